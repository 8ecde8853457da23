"""Schedulers and machines for which `pipe launch` writes a script, by name, and what is here that a
run needs elsewhere. `templates/` has a template of each target."""

from __future__ import annotations

import functools
import itertools
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.distributed.environment import TOKEN
from pipeline.errors import COMMAND_LINE, Location, UsageError
from pipeline.recipe.dump import inline
from pipeline.recipe.load import Recipe
from pipeline.recipe.nodes import plain, texts_in
from pipeline.recipe.parse import parse

TEMPLATES = Path(__file__).parent / "templates"
WIDTH = 100
NEW_TOKEN = "$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')"
"""A secret, for a POSIX shell."""
MACHINE = ("/dev", "/proc", "/sys")
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
    nodes: int
    ranks: int
    """Ranks, at most."""
    fewest_ranks: int
    """Ranks without which the run does not continue."""
    procs: int | None
    """Processes on each node; None is one per GPU that is there."""
    gpus: int
    """GPUs of each node; 0 computes on CPUs."""
    cpus: float
    """Cores that an engine reserves for each rank."""
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
    """`node`: one process a node starts the others; `gpu`: the scheduler starts each rank;
    `engine`: one process starts all."""
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
        return self.nodes > 1 and self.tasks == "node"

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

    name: str
    """Its name, and its template's."""
    submit: Sequence[str]
    """Command that takes the text on standard input, or in the file that stands for `{file}`;
    `{env}` stands for the variables that the nodes get from here, by name."""
    client: str
    """Program that must be installed for that."""
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
    forgets: bool = False
    """Whether what is not in a mounted folder is gone with the container."""
    env_option: str = ""
    """Option that `{env}` puts before each name."""
    secret: str = ""
    """Template of a shell command that hands over the nodes' secret before that one."""
    engine: str = ""
    """Engine that starts all ranks there; empty for none."""
    carries_out: bool = False
    """Whether the client carries out the run itself, and ends with its exit code."""

    @functools.cached_property
    def uses(self) -> frozenset[str]:
        """Fields of a job that it uses."""
        text = (TEMPLATES / f"{self.name}.j2").read_text("utf-8")
        for part in re.findall(r'import "([\w.-]+)"', text):
            text += (TEMPLATES / part).read_text("utf-8")
        return frozenset(re.findall(r"\bjob\.(\w+)", text))

    @property
    def brings(self) -> bool:
        """Whether its script brings what the recipe names on this machine."""
        return "paths" in self.uses

    def write(self, job: Job) -> str:
        """The script or file. Raises UsageError where a job would be stopped at its start."""
        if job.time_limit and _seconds(job.time_limit) <= job.grace:
            raise UsageError(
                f"a job with --time-limit {job.time_limit} would be stopped at its start, --grace "
                f"{job.grace} seconds before its end",
                hint="raise --time-limit, or lower --grace",
            )
        return _render(self.name, job)

    def prepare(self, job: Job) -> str:
        """Shell command before `submit`; empty for none."""
        return _render(self.secret, job) if self.secret and job.needs_token else ""


def _render(template: str, job: Job) -> str:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters.update(
        comment=_comment, quote=shlex.quote, yaml=_value,
        in_place=lambda paths: [f"{path}:{path}" for path in paths],  # as mounts
    )  # fmt: skip
    environment.globals.update(
        label=label, TOKEN=TOKEN, NEW_TOKEN=NEW_TOKEN,
        entry=lambda key, value: yaml.dump(  # of a YAML mapping
            {key: value}, Dumper=_Dumper, width=1 << 20
        ).removesuffix("\n"),
    )  # fmt: skip
    return environment.get_template(f"{template}.j2").render(job=job)


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


def _seconds(limit: str) -> int:
    """The seconds of a time limit: MINUTES[:SECONDS], HOURS:MINUTES:SECONDS or DAYS-HOURS[:...]."""
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:
        parts = [0, *parts]
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return 60 * (60 * (24 * int(days or 0) + hours) + minutes) + seconds


KUBECTL = ("kubectl", "create", "-f", "{file}")
TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target(
            name="slurm", submit=("sbatch",), client="sbatch", mount=MOUNT_WITH_OPTIONS,
            forms={"time_limit": TIME, "extra": FLAG},
        ),
        Target(
            name="kubeflow", submit=KUBECTL, client="kubectl",
            secret="secret", needs=frozenset({"image"}), mount=CLAIM,
        ),
        Target(
            name="jobset", submit=KUBECTL, client="kubectl",
            secret="secret", needs=frozenset({"image"}), mount=CLAIM,
        ),
        Target(
            name="kuberay", submit=KUBECTL, client="kubectl",
            needs=frozenset({"image"}), mount=CLAIM, engine="ray",
        ),
        Target(name="ray", submit=("bash", "{file}"), client="ray", engine="ray"),
        Target(
            name="skypilot", submit=("sky", "jobs", "launch", "--yes", "{env}", "{file}"),
            client="sky", env_option="--secret", fresh=True, takes_folder=True,
            needs_with_gpus=frozenset({"kind"}),
        ),
        Target(
            name="dstack", submit=("dstack", "apply", "--yes", "--file", "{file}"),
            client="dstack", fresh=True, forgets=True,
        ),
        Target(
            name="docker", submit=("bash", "{file}"), client="docker", carries_out=True,
            mount=MOUNT_WITH_OPTIONS, forms={"extra": FLAG}, forgets=True,
            needs=frozenset({"image"}),
        ),
    )
}  # fmt: skip


def named_paths(recipe: Recipe) -> tuple[list[str], list[str]]:
    """Return the absolute paths that a recipe names and that are here, its own files first, without
    paths inside others; and the ones that are not here. Paths of an environment variable are not
    written down."""
    texts = texts_in(recipe.public().get("stages", {}))
    absolute = (Path(text) for text in texts if text.startswith("/") and "://" not in text)
    # of a path with a wildcard, the folder before it
    named = [
        Path(*itertools.takewhile(lambda part: not re.search(r"[*?\[]", part), path.parts))
        for path in absolute
    ]
    named = [path for path in named if path != Path("/") and not str(path).startswith(MACHINE)]
    here = [path.absolute() for path in recipe.source_files]
    here += [path for path in named if path.exists()]
    # folders of the files that a folder's links name, as in the hub's cache
    folders = [path for path in here if path.is_dir()]
    links = [link for path in folders for link in path.iterdir() if link.is_symlink()]
    here += dict.fromkeys(link.resolve().parent for link in links if link.exists())
    outermost = [path for path in dict.fromkeys(here) if not any(p in here for p in path.parents)]
    missing = dict.fromkeys(str(path) for path in named if not path.exists())
    return [str(path) for path in outermost], list(missing)


def with_absolute_paths(override: str) -> str:
    """Return an override whose texts that start with `./` or `../` are absolute."""
    path, _, text = override.partition("=")
    place = Location(file=COMMAND_LINE)

    def value(folder: Path) -> Any:
        node, _ = parse(text, locate=lambda line, column: place, folder=folder)
        return node and plain(node)

    here = value(Path.cwd())
    return override if here == value(Path("/")) else f"{path}={inline(here)}"


def within(path: str, folders: Sequence[str]) -> bool:
    """Return whether a path is one of these folders, or lies in one."""
    return any(Path(path).is_relative_to(folder) for folder in folders)


def activation() -> list[str]:
    """Return shell lines that activate this process's environment of Python, if it has one."""
    conda = os.environ.get("CONDA_PREFIX")
    if sys.prefix != sys.base_prefix:
        return [f". {shlex.quote(str(Path(sys.prefix, 'bin', 'activate')))}"]
    if conda and Path(conda) == Path(sys.prefix):
        program = os.environ.get("CONDA_EXE") or str(Path(conda, "bin", "conda"))
        return [
            f'eval "$({shlex.quote(program)} shell.posix hook)"',
            f"conda activate {shlex.quote(conda)}",
        ]
    return []
