"""A run to hand to a scheduler, and what a target makes of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.distributed.environment import TOKEN

Form = tuple[re.Pattern[str], str]
"""The look of an option's value, and that in words."""
_PAIR = r".+:(?P<target>[/~][^:]*)"
MOUNT: Form = (re.compile(_PAIR), "SOURCE:TARGET with an absolute TARGET")
MOUNT_WITH_OPTIONS: Form = (re.compile(rf"{_PAIR}(:[a-z,]+)?"), MOUNT[1])
FLAG: Form = (re.compile(r"-.+"), "an option, as in --extra=--partition=a")
LINE: Form = (re.compile(r".+"), "one line")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run, as far as a script has to say it."""

    name: str
    arguments: Sequence[str]
    """Arguments of `pipe`: `run RECIPE ... --run-dir DIR`."""
    fewest_nodes: int
    most_nodes: int
    procs: int | None
    """Processes on each node; None is one per GPU that is there."""
    gpus: int
    """GPUs of each node; 0 computes on CPUs."""
    kind: str
    """Kind of GPU, as the scheduler calls it; empty for any."""
    image: str
    """Container image that has this program; empty for none."""
    setup: str
    """Command that installs this program where no image has it; empty for none."""
    mounts: Sequence[str]
    """`SOURCE:TARGET` of each folder that the container sees."""
    time_limit: str
    """As the scheduler writes it; empty for its own."""
    grace: int
    """Seconds before the time limit at which the run is asked to save and stop."""
    tasks: str
    """`node`: one process a node starts the others; `gpu`: the scheduler starts each rank."""
    paths: Sequence[str]
    """Absolute paths that the recipe names, its own files too, and that no mount brings."""
    files: Sequence[str]
    """The recipe's own files of these."""
    folder: str
    """Folder in which the command was given."""
    run_dir: str
    """The run's folder; empty if a mount brings it."""
    activation: Sequence[str]
    """Shell lines that give the environment of Python in which the command was given."""
    env: Sequence[str]
    """Names of the environment variables that the recipe reads."""
    extra: Sequence[str]
    """Lines or options of the target's own."""

    @property
    def needs_token(self) -> bool:
        """Whether nodes meet that must share a secret."""
        return self.most_nodes > 1 and self.tasks == "node"

    @property
    def variables(self) -> list[str]:
        """Names of the variables that the nodes get from here: the recipe's, and the secret."""
        return list(dict.fromkeys([*self.env, *([TOKEN] if self.needs_token else [])]))

    @property
    def command(self) -> str:
        """The command line of `pipe`, for a POSIX shell."""
        return shlex.join(["pipe", *self.arguments])


@dataclass(frozen=True, kw_only=True)
class Target:
    """A scheduler, or a machine with Docker."""

    write: Callable[[Job], str]
    """Makes the text of the script or file."""
    submit: Sequence[str]
    """Command that takes the text on standard input, or in the file that stands for `{file}`;
    `{env}` stands for the variables that the nodes get from here, by name."""
    client: str
    """Program that must be installed for that."""
    uses: frozenset[str]
    """Fields of a job that it can do something with, besides those that all can."""
    needs: frozenset[str] = frozenset()
    """Fields without which it makes no sense."""
    needs_with_gpus: frozenset[str] = frozenset()
    """The same for a job on GPUs."""
    mount: Form = MOUNT
    """The look of a mount."""
    forms: Mapping[str, Form] = field(default_factory=dict)
    """The same for other fields."""
    fresh: bool = False
    """Whether its machines come without this program, so that an image or a command brings it."""
    takes_folder: bool = False
    """Whether the current folder goes to its machines, and is the current folder there."""
    takes_recipe: bool = False
    """Whether the recipe's own files go along with the script, whatever else does."""
    brings: bool = False
    """Whether its script brings what the recipe names on this machine."""
    forgets: bool = False
    """Whether what is not in a mounted folder is gone with the container."""
    env_option: str = ""
    """Option that `{env}` puts before each name."""
    prepare: Callable[[Job], str] = lambda job: ""
    """Shell command before that one; empty for none."""
    carries_out: bool = False
    """Whether the client carries out the run itself, and ends with its exit code."""
