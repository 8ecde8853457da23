"""Options and arguments that several commands have, each with one meaning and one wording."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pipeline.commands.completion import OVERRIDE, RECIPE, RUN

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
