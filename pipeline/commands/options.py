"""Options and arguments that several commands have, each with one meaning and one wording."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pipeline.commands.completion import OVERRIDE, RECIPE, RUN
from pipeline.utils.foreign import TRUST_CODE, TRUST_PICKLE, trusted
from pipeline.utils.hub import PINNED

F = TypeVar("F", bound=Callable[..., Any])


class Count(click.IntRange):
    """A whole number within bounds."""

    name = "number"


JSON_HELP = "Print JSON on standard output."
FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)

json_option = click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
overrides_argument = click.argument("overrides", nargs=-1, shell_complete=OVERRIDE)
recipe_argument = click.argument("recipe", type=click.Path(path_type=Path), shell_complete=RECIPE)
dry_run_option = click.option(
    "-n", "--dry-run", is_flag=True, help="Print what would run, and run nothing."
)


def out_option(
    text: str, *, kind: click.Path = FILE, default: str | None = None
) -> Callable[[F], F]:
    """Return the option for the file or folder that a command writes, by default `default`."""
    return click.option("-o", "--out", type=kind, show_default=default, help=text)


def runs_option(text: str) -> Callable[[F], F]:
    """Return the option for the folder in which a command makes its own."""
    return click.option(
        "--runs", type=FOLDER, default="runs", show_default=True, metavar="FOLDER", help=text
    )


def run_argument(
    name: str = "run", *, metavar: str = "RUN", address: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add an argument for one run, by default the newest one in ./runs, which is then named on
    standard error. It comes as a path, or as text if it may be an `address`. An override in its
    place is an override of the newest run."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @click.argument(name, metavar=f"[{metavar}]", required=False, shell_complete=RUN)
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
    """Return the newest run in ./runs, and name it on standard error. Raises UsageError if there is
    none."""
    from pipeline.execution import rundir

    folder = rundir.newest(Path("runs"))
    click.echo(f"run: {folder}", err=True)
    return folder


PERMISSIONS = {
    "--trust-pickle": (
        TRUST_PICKLE,
        "Read pickles (.bin, .pt, checkpoints of DeepSpeed and DCP) with a restricted reader.",
    ),
    "--trust-remote-code": (
        TRUST_CODE,
        "Run code of a model, of a folder of tasks or of a hub kernel, if the recipe asks for it.",
    ),
    "--pinned": (
        PINNED,
        f"Refuse a model or data set of the hub without a commit. [env var: {PINNED}=1]",
    ),
}
"""Option -> the environment variable of the same meaning, which it sets, and its help."""


def _permission(flag: str, text: str = "") -> Callable[[F], F]:
    variable, usual = PERMISSIONS[flag]

    def set_if_given(context: click.Context, parameter: click.Parameter, given: bool) -> None:
        if given:
            os.environ[variable] = "1"

    return click.option(
        flag, is_flag=True, expose_value=False, callback=set_if_given, help=text or usual
    )


code_option = _permission("--trust-remote-code", "Run model code that came with the model.")
"""The one option of a command that reads a folder instead of a recipe."""
pinned_option = _permission("--pinned")


def trust_options(command: F) -> F:
    """Add the options to read pickles, and to run code that is not an installed stage."""
    return _permission("--trust-pickle")(_permission("--trust-remote-code")(command))


def permissions() -> list[str]:
    """Return the options of PERMISSIONS that are in force."""
    return [flag for flag, (variable, _) in PERMISSIONS.items() if trusted(variable)]


def display_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --quiet, --verbose and --json; the command is called with a `display` in their place."""

    @click.option("-q", "--quiet", is_flag=True, help="Show warnings and errors only.")
    @click.option("-v", "--verbose", is_flag=True, help="Show debug messages too.")
    @click.option("--json", is_flag=True, help=JSON_HELP)
    @functools.wraps(command)
    def with_display(*args: Any, quiet: bool, verbose: bool, json: bool, **rest: Any) -> Any:
        from pipeline.view.display import Display

        if quiet and (verbose or json):
            raise click.UsageError("--quiet excludes --verbose and --json")
        return command(*args, display=Display(quiet=quiet, verbose=verbose, json=json), **rest)

    return with_display


def selection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --from, --until and --only; the command is called with a `selection` in their place."""

    @click.option("--from", "first", metavar="SLOT", help="Run SLOT and all later slots again.")
    @click.option("--until", "last", metavar="SLOT", help="Stop after SLOT.")
    @click.option("--only", metavar="SLOT", help="Run SLOT only, even if it has finished.")
    @functools.wraps(command)
    def with_selection(
        *args: Any, first: str | None, last: str | None, only: str | None, **rest: Any
    ) -> Any:
        from pipeline.execution.resume import Selection

        return command(*args, selection=Selection(first=first, last=last, only=only), **rest)

    return with_selection
