"""Schedulers and machines for which `pipe launch` writes a script, by name; `templates/` has a
template of each."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.distributed.environment import TOKEN
from pipeline.errors import UsageError

Form = tuple[re.Pattern[str], str]
"""The look of an option's value, and that in words."""
_PAIR = r".+:(?P<target>[/~][^:]*)"
MOUNT: Form = (re.compile(_PAIR), "SOURCE:TARGET with an absolute TARGET")
MOUNT_WITH_OPTIONS: Form = (re.compile(rf"{_PAIR}(:[a-z,]+)?"), MOUNT[1])
FLAG: Form = (re.compile(r"-.+"), "an option, as in --extra=--partition=a")
LINE: Form = (re.compile(r".+"), "one line")
TIME: Form = (re.compile(r"(\d+-)?\d+(:\d+){0,2}"), "[DAYS-]HOURS:MINUTES:SECONDS")
"""Forms of sbatch's --time (https://slurm.schedmd.com/sbatch.html)."""
CLAIM: Form = (
    re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?:(?P<target>/[^:]*)"),
    "CLAIM:TARGET with an absolute TARGET",
)
"""A claim's name is a DNS subdomain
(https://kubernetes.io/docs/concepts/overview/working-with-objects/names/)."""


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
    """Fields of a job that it uses in addition to the fields that all use."""
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


WIDTH = 100
NEW_TOKEN = "$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')"
"""A secret, for a POSIX shell."""


def render(target: str, job: Job, **more: str) -> str:
    """Return the script of a target."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        comment=_comment, quote=shlex.quote, yaml=_value,
        in_place=lambda paths: [f"{path}:{path}" for path in paths],  # as mounts
    )  # fmt: skip
    environment.globals.update(label=label, entry=_entry, TOKEN=TOKEN, NEW_TOKEN=NEW_TOKEN)
    return environment.get_template(f"{target}.j2").render(job=job, **more)


def label(name: str, longest: int) -> str:
    """The name with what DNS allows in a label: small letters, digits and dashes, a letter first.
    dstack wants two of them at least."""
    found = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    found = found if len(found) > 1 and found[0].isalpha() else f"run-{found}"
    return found[:longest].rstrip("-")


def _comment(text: str) -> str:
    """Paragraphs as comment lines of a shell script or YAML file."""
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        lines += textwrap.wrap(paragraph, WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    return "".join(f"# {line}\n" for line in lines)


def _entry(key: str, value: Any) -> str:
    """An entry of a YAML mapping."""
    return yaml.dump({key: value}, Dumper=_Dumper, width=1 << 20).removesuffix("\n")


def _value(value: Any) -> str:
    """A text or number on one line of a YAML file."""
    style = '"' if "\n" in str(value) else None
    text: str = yaml.safe_dump(value, default_style=style, width=1 << 20)
    return text.removesuffix("\n").removesuffix("\n...")


class _Dumper(yaml.SafeDumper):
    """Writes text that ends with a line break as a literal block, and aliases in full."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if text.endswith("\n") and text.strip() else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _slurm(job: Job) -> str:
    """The script for `sbatch`. Raises UsageError where a job would be stopped at its start."""
    if job.time_limit and _seconds(job.time_limit) <= job.grace:
        raise UsageError(
            f"a job with --time-limit {job.time_limit} would be stopped at its start, --grace "
            f"{job.grace} seconds before its end",
            hint="raise --time-limit, or lower --grace",
        )
    return render("slurm", job)


def _seconds(limit: str) -> int:
    """The seconds of a time limit: MINUTES[:SECONDS], HOURS:MINUTES:SECONDS or DAYS-HOURS[:...]."""
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:
        parts = [0, *parts]
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return 60 * (60 * (24 * int(days or 0) + hours) + minutes) + seconds


def _kubernetes_secret(job: Job) -> str:
    """Make the secret of the nodes from the environment; one of an earlier start is as good."""
    name = f"{label(job.name, 50)}-rendezvous"  # with room for what the names of pods add
    return "" if not job.needs_token else (
        f"kubectl get secret {name} >/dev/null 2>&1 || printenv {TOKEN} | "
        f"kubectl create secret generic {name} --from-file={TOKEN}=/dev/stdin"
    )  # fmt: skip


TARGETS: Mapping[str, Target] = {
    "slurm": Target(
        write=_slurm,
        submit=("sbatch",),
        client="sbatch",
        mount=MOUNT_WITH_OPTIONS,
        forms={"time_limit": TIME, "extra": FLAG},
        brings=True,
        uses=frozenset(
            {"image", "setup", "mounts", "time_limit", "grace", "tasks", "extra", "kind"}
        ),
    ),
    "kubeflow": Target(
        write=lambda job: render("kubeflow", job, prepare=_kubernetes_secret(job)),
        submit=("kubectl", "create", "-f", "{file}"),
        client="kubectl",
        prepare=_kubernetes_secret,
        uses=frozenset({"image", "mounts", "grace"}),
        needs=frozenset({"image"}),
        mount=CLAIM,
    ),
    "skypilot": Target(
        write=partial(render, "skypilot"),
        submit=("sky", "jobs", "launch", "--yes", "{env}", "{file}"),
        client="sky",
        env_option="--secret",
        fresh=True,
        takes_folder=True,
        brings=True,
        uses=frozenset({"image", "setup", "mounts", "kind"}),
        needs_with_gpus=frozenset({"kind"}),
    ),
    "dstack": Target(
        write=partial(render, "dstack"),
        submit=("dstack", "apply", "--yes", "--file", "{file}"),
        client="dstack",
        fresh=True,
        takes_recipe=True,
        forgets=True,
        uses=frozenset({"image", "setup", "mounts", "kind"}),
    ),
    "docker": Target(
        write=partial(render, "docker"),
        submit=("bash", "{file}"),
        client="docker",
        carries_out=True,
        mount=MOUNT_WITH_OPTIONS,
        forms={"extra": FLAG},
        brings=True,
        forgets=True,
        uses=frozenset({"image", "mounts", "grace", "extra"}),
        needs=frozenset({"image"}),
    ),
}
