"""Options that restrict a start of a run to a part of its chain."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click


def selection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --from, --until and --only; the command is called with a `selection` in their place."""

    @click.option("--from", "first", metavar="SLOT", help="Run SLOT and all later slots again.")
    @click.option("--until", "last", metavar="SLOT", help="Stop after SLOT.")
    @click.option("--only", metavar="SLOT", help="Run SLOT only, even if it has finished.")
    @functools.wraps(command)
    def with_selection(
        *args: Any, first: str | None, last: str | None, only: str | None, **rest: Any
    ) -> Any:
        from pipeline.execution.selection import Selection

        return command(*args, selection=Selection(first=first, last=last, only=only), **rest)

    return with_selection
