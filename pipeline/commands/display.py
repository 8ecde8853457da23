"""Options that say what is shown of a run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from pipeline.commands.options import JSON_HELP


def display_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --quiet, --verbose and --json; the command is called with a `display` in their place."""

    @click.option("-q", "--quiet", is_flag=True, help="Show warnings and errors only.")
    @click.option("-v", "--verbose", is_flag=True, help="Show debug messages too.")
    @click.option("--json", is_flag=True, help=JSON_HELP)
    @functools.wraps(command)
    def with_display(*args: Any, quiet: bool, verbose: bool, json: bool, **rest: Any) -> Any:
        from pipeline.view.screen import Display

        if quiet and (verbose or json):
            raise click.UsageError("--quiet excludes --verbose and --json")
        return command(*args, display=Display(quiet=quiet, verbose=verbose, json=json), **rest)

    return with_display
