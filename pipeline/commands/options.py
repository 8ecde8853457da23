"""Options and arguments that several commands have, each with one meaning and one wording, and what
shells complete them to.

Shells call `pipe` itself for this (click's mechanism), so all of it must be fast and silent.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import click
from click.shell_completion import CompletionItem, get_completion_class

from pipeline.utils.files import expanded
from pipeline.utils.foreign import TRUST_CODE, TRUST_PICKLE, trusted
from pipeline.utils.hub import PINNED

if TYPE_CHECKING:
    from pipeline.chain.registry import Registry
    from pipeline.planning.hardware import HardwareOptions, Margins


Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
MOST_RUNS = 50
NO_SPACE = (
    "    return 0\n",
    "    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=/] ]] && compopt -o nospace\n"
    "    return 0\n",
)
"""The end of click's function for bash, and one that adds no space after a key or a folder."""


@click.command("completion")
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print the shell code that completes `pipe` commands.

    For bash, put eval "$(pipe completion bash)" into ~/.bashrc. Completes commands, options,
    recipes, runs, stages, and the keys and values of overrides.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    main = click.get_current_context().find_root().command
    source = kind(main, {}, "pipe", "_PIPE_COMPLETE").source()
    click.echo(source.replace(*NO_SPACE) if shell == "bash" else source)


def _quietly(found: Callable[[click.Context, str], Iterator[str]]) -> Complete:
    """Offer to click what `found` yields and begins as typed; nothing if it fails."""

    def complete(
        context: click.Context, parameter: click.Parameter, typed: str
    ) -> list[CompletionItem]:
        with contextlib.suppress(Exception):
            return [CompletionItem(one) for one in found(context, typed) if one.startswith(typed)]
        return []

    return complete


def _folder_in(typed: str) -> tuple[str, Path]:
    """Return the part of a path up to its last slash, as it was typed, and the folder it names."""
    head = typed[: typed.rfind("/") + 1]
    return head, expanded(head)


def _folders(typed: str) -> Iterator[str]:
    head, folder = _folder_in(typed)
    names = sorted(one.name for one in folder.iterdir() if one.is_dir() and one.name[:1] != ".")
    yield from (f"{head}{name}/" for name in names)


@_quietly
def complete_runs(context: click.Context, typed: str) -> Iterator[str]:
    head, folder = _folder_in(typed if "/" in typed else "runs/")
    files = sorted(folder.glob("*/recipe.yaml"), key=lambda file: -file.stat().st_mtime)
    found = [f"{head}{file.parent.name}" for file in files]
    yield from found[:MOST_RUNS]
    yield from (folder for folder in _folders(typed) if folder[:-1] not in found)


@_quietly
def complete_recipes(context: click.Context, typed: str) -> Iterator[str]:
    head, folder = _folder_in(typed)
    files = sorted(one.name for one in folder.iterdir() if one.suffix in (".yaml", ".yml"))
    yield from (f"{head}{name}" for name in files)
    yield from _folders(typed)


@_quietly
def complete_stages(context: click.Context, typed: str) -> Iterator[str]:
    from pipeline.chain.registry import Registry

    yield from Registry.installed().names()


@_quietly
def complete_shipped(context: click.Context, typed: str) -> Iterator[str]:
    from pipeline.recipe import includes

    yield from includes.shipped()


@_quietly
def complete_overrides(context: click.Context, typed: str) -> Iterator[str]:
    """Yield `slot.field=` for every field of the recipe's stages, and the values of a field."""
    from pipeline.chain.registry import Registry, kind_of
    from pipeline.contracts.signature import needs
    from pipeline.distributed.settings import Launch
    from pipeline.execution import rundir
    from pipeline.recipe import read_recipe

    arguments = (context.params.get(name) for name in ("recipe", "run_dir", "run"))
    named = Path(next(path for path in arguments if path is not None))
    recipe, _ = read_recipe(named / rundir.RECIPE if named.is_dir() else named)
    if recipe is None:
        return
    registry, earlier = Registry.installed(), list[str]()
    kinds = dict(_fields("launch", Launch))
    for slot, spec in recipe.stages.items():
        stage = registry.load(spec.use)
        kinds |= _fields(slot, stage)
        kinds |= {f"{slot}.takes.{one.parameter}": Literal[tuple(earlier)] for one in needs(stage)}
        earlier.append(slot)
        kinds[f"{slot}.use"] = Literal[tuple(registry.names(kind_of(spec.use)))]
    # the key whose value is being typed, None before the `=`, and what of it belongs to the word:
    # bash takes `key`, `=` and the value for three words, and click leaves an `=` out that is last
    name, given, _ = typed.partition("=")
    before, last = ("", "", *(context.params.get("overrides") or ()))[-2:]
    key, head = (name, f"{name}=") if given else (None, "")
    if not given and last == "=":
        key = before
    elif not given and last and "=" not in last and before != "=":
        key = last
    if key is None:
        yield from (f"{path}=" for path in kinds)
    elif key in kinds:
        yield from (f"{head}{value}" for value in _values(kinds[key]))


def _fields(slot: str, owner: type) -> Iterator[tuple[str, Any]]:
    """Yield `slot.field` and its type for the fields of a dataclass."""
    kinds = get_type_hints(owner)
    yield from ((f"{slot}.{n}", kinds[n]) for n in getattr(owner, "__dataclass_fields__", ()))


def _values(kind: Any) -> Iterator[str]:
    """Yield the values of a type as they are written in a recipe, if there are few."""
    if kind is bool:
        yield from ("true", "false")
    elif kind is type(None):
        yield "null"
    elif get_origin(kind) is Literal:
        yield from map(str, get_args(kind))
    elif get_origin(kind) in (Union, types.UnionType):
        for inner in get_args(kind):
            yield from _values(inner)


Command = Callable[..., Any]
Decorator = Callable[[Command], Command]
PATH = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, dir_okay=False)
EXISTING = click.Path(path_type=Path, dir_okay=False, exists=True)
FOLDER = click.Path(path_type=Path, file_okay=False)
JSON_HELP = "Print JSON on standard output."


class Count(click.IntRange):
    """A whole number within bounds."""

    name = "number"


def together(*decorators: Decorator) -> Decorator:
    """Return one decorator for several options, in the order in which `--help` shows them."""

    def add(command: Command) -> Command:
        return functools.reduce(lambda made, one: one(made), reversed(decorators), command)

    return add


def option(*names_and_help: str, **more: Any) -> Decorator:
    """Return click's option; the last text is its help, and a default is shown there."""
    *names, text = names_and_help
    more.setdefault("show_default", "default" in more)
    return click.option(*names, help=text, **more)


flag = functools.partial(option, is_flag=True)
as_json = flag("--json", "as_json", JSON_HELP)
overrides = click.argument("overrides", nargs=-1, shell_complete=complete_overrides)
recipe = together(click.argument("recipe", type=PATH, shell_complete=complete_recipes), overrides)
dry_run = flag("-n", "--dry-run", "Print what would run, and run nothing.")
revision = option("--revision", "Commit, branch or tag of a hub model.", show_default="main")


def out(text: str, *, kind: click.Path = FILE, default: str | None = None) -> Decorator:
    """Return the option for the file or folder that a command writes, by default `default`."""
    return option("-o", "--out", text, type=kind, show_default=default)


def runs_folder(text: str) -> Decorator:
    """Return the option for the folder in which a command makes its own."""
    return option("--runs", text, type=FOLDER, default="runs", metavar="FOLDER")


def run(name: str = "run", *, metavar: str = "RUN", address: bool = False) -> Decorator:
    """Add an argument for one run, by default the newest one in ./runs, which is then named on
    standard error. It comes as a path, or as text if it may be an `address`. An override in its
    place is an override of the newest run."""

    def add(command: Command) -> Command:
        @click.argument(name, metavar=f"[{metavar}]", required=False, shell_complete=complete_runs)
        @functools.wraps(command)
        def with_run(*args: Any, **given: Any) -> Any:
            named: str | None = given.pop(name)
            if named and "overrides" in given and "=" in named and not Path(named).exists():
                given["overrides"] = (named, *given["overrides"])
                named = None
            chosen = named or str(newest_run())
            return command(*args, **{name: chosen if address else Path(chosen)}, **given)

        return with_run

    return add


def newest_run() -> Path:
    """Return and name, on standard error, the newest run in ./runs. Raises UsageError."""
    from pipeline.execution import rundir

    folder = rundir.newest(Path("runs"))
    click.echo(f"run: {folder}", err=True)
    return folder


def registry() -> Registry:
    """Return the stages that the caller of the command has given, or the installed ones."""
    from pipeline.chain.registry import Registry

    given: Registry | None = click.get_current_context().obj
    return given or Registry.installed()


PERMISSIONS = {
    "--trust-pickle": TRUST_PICKLE, "--trust-remote-code": TRUST_CODE, "--pinned": PINNED
}  # fmt: skip
"""Option -> the environment variable of the same meaning, which it sets."""


def _permission(name: str, text: str) -> Decorator:
    def set_if_given(context: click.Context, parameter: click.Parameter, given: bool) -> None:
        if given:
            os.environ[PERMISSIONS[name]] = "1"

    return flag(name, text, expose_value=False, callback=set_if_given)


trust_code = _permission("--trust-remote-code", "Run model code that came with the model.")
"""The one option of a command that reads a folder instead of a recipe."""
pinned = _permission(
    "--pinned", f"Refuse a model or data set of the hub without a commit. [env var: {PINNED}=1]"
)
trust = together(
    _permission("--trust-pickle", "Read pickles (.bin, .pt, checkpoints of DeepSpeed and DCP) with "
                "a restricted reader."),
    _permission("--trust-remote-code", "Run code of a model, of a folder of tasks or of a hub "
                "kernel, if the recipe asks for it."),
)  # fmt: skip


def permissions() -> list[str]:
    """Return the options of PERMISSIONS that are in force."""
    return [name for name, variable in PERMISSIONS.items() if trusted(variable)]


def display(command: Command) -> Command:
    """Add --quiet, --verbose and --json; the command is called with a `display` in their place."""

    @flag("-q", "--quiet", "Show warnings and errors only.")
    @flag("-v", "--verbose", "Show debug messages too.")
    @flag("--json", JSON_HELP)
    @functools.wraps(command)
    def with_display(*args: Any, quiet: bool, verbose: bool, json: bool, **rest: Any) -> Any:
        from pipeline.view.screen import Display

        if quiet and (verbose or json):
            raise click.UsageError("--quiet excludes --verbose and --json")
        return command(*args, display=Display(quiet=quiet, verbose=verbose, json=json), **rest)

    return with_display


def selection(command: Command) -> Command:
    """Add --from, --until and --only; the command is called with a `selection` in their place."""

    @option("--from", "first", "Run SLOT and all later slots again.", metavar="SLOT")
    @option("--until", "last", "Stop after SLOT.", metavar="SLOT")
    @option("--only", "Run SLOT only, even if it has finished.", metavar="SLOT")
    @functools.wraps(command)
    def with_selection(*args: Any, first: Any, last: Any, only: Any, **rest: Any) -> Any:
        from pipeline.execution.resume import Selection

        return command(*args, selection=Selection(first=first, last=last, only=only), **rest)

    return with_selection


class GpuCount(Count):
    """A number of GPUs."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not value.lstrip("-").isdecimal():
            self.fail(f"{value} is not a number of GPUs; --gpu {value} is their kind.", param, ctx)
        return super().convert(value, param, ctx)


GPUS = GpuCount(min=1, max=256)
"""GPUs of a node."""
MOST = 10**6
"""GiB, or GB/s, of anything in a machine."""


def amount(given: str, least: float = 1e-3) -> float:
    """GiB or GB/s; not nan, which no comparison keeps out of a range."""
    number = float(click.FloatRange(min=least, max=MOST).convert(given, None, None))  # type: ignore[arg-type]
    if math.isnan(number):
        raise click.BadParameter(f"{given!r} is not a number.")
    return number


def spare(given: str) -> float:
    """GiB, possibly none."""
    return amount(given, 0)


def link(given: str) -> float:
    """GB/s of a link by its name, of several as in `8x400g`, or as a number."""
    from pipeline.hardware.gpus import GB, NETWORKS

    cards = re.fullmatch(r"(?:([1-9][0-9]?)x)?([0-9]+g(?:be)?)", given.lower())
    if cards is not None and cards[2] in NETWORKS:
        return int(cards[1] or 1) * NETWORKS[cards[2]] / GB
    try:
        float(given)
    except ValueError:
        names = f"nor one of {', '.join(NETWORKS)}, nor several of them as in 8x400g"
        raise click.BadParameter(f"{given!r} is neither a number of GB/s {names}.") from None
    return amount(given)


MACHINE = {
    "--gpus": (GPUS, "GPUs in a node."),
    "--nodes": (Count(min=1, max=100_000), "Nodes, of 8 GPUs each without --gpus."),
    "--gpu": (str, "Kind of GPU, such as H100 or 'A100 40GB'."),
    "--memory": (amount, "Memory of a GPU in GiB, if not as usual for its kind."),
    "--host-memory": (amount, "Host memory of a node in GiB."),
    "--interconnect": (link, "Network of a node: 100gbe, 8x400g, ..., or GB/s."),
    "--nvme": (amount, "GB/s of the disk for offloaded state."),
    "--overhead": (spare, "GiB of a GPU in use outside torch, if not the measured value."),
    "--measured": (click.Path(path_type=Path, exists=True), "Run that measured memory outside "
                   "tensors on this kind of GPU, if not the newest one in ./runs."),
    "--price": (amount, "Price of a GPU hour, to predict the cost."),
    "--machine": (EXISTING, "Report of `pipe doctor --out` on such a machine."),
}  # fmt: skip
"""Option -> its type, and help."""
machine = together(*(option(name, text, type=kind) for name, (kind, text) in MACHINE.items()))
"""Options that say what machines a recipe is meant for; `machines` takes their values."""


def machines(
    *, nvme: float | None = None, overhead: float | None = None, measured: Path | None = None,
    machine: Path | None = None, **given: Any,
) -> tuple[HardwareOptions, Margins]:  # fmt: skip
    """The machines, and the margins of their GPUs. Raises UsageError for a file that describes no
    machine, or no run's memory."""
    from pipeline.planning.hardware import HardwareOptions, margins_for

    report = None
    if machine is not None:
        from pipeline.doctor.report import read_machine

        report = read_machine(machine)
    found = HardwareOptions(disk=nvme, machine=report, **given)
    return found, margins_for(found.kind, record=measured, overhead=overhead)
