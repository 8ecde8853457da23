"""What a launching process shows of its run: the choice among the screens."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

from pipeline.contracts.engine import Engine
from pipeline.distributed.environment import is_worker
from pipeline.utils.terminal import set_display
from pipeline.utils.text import plural
from pipeline.view.run import Run
from pipeline.view.screen import Harmless, Screen

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan

Choice = Literal["live", "lines", "quiet", "json"]


class _Recording(Screen):
    """A screen during whose run this machine's GPUs are recorded, as long as that is possible."""

    def __init__(self, screen: Screen, folder: Path) -> None:
        from pipeline.execution.gpu_records import HardwareRecord

        self._screen, self.output = screen, screen.output
        self._record = HardwareRecord(folder)

    def refresh(self) -> None:
        with contextlib.suppress(Exception):  # it is for people alone
            self._record.look()
        self._screen.refresh()

    def close(self) -> None:
        self._screen.close()

    def end(self) -> None:
        self._screen.end()


class Display:
    """Shows the run of this process as a person has asked for: at most one in a process."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False, json: bool = False) -> None:
        """Decide what to show, and tell it to the ranks that this process will start, or to itself
        if it is one. With `json`, all that this process and its ranks print goes to standard error
        from now on, and events to what was standard output."""
        self._choice = _choice(quiet=quiet, json=json)
        set_display(f"{self._choice} verbose" if verbose else self._choice)
        self._events = _set_aside_stdout() if json else None
        self._screen = Screen()

    @contextlib.contextmanager
    def to_the_end(self) -> Iterator[None]:
        """Show the end that the body records of the run that it has `shown`."""
        try:
            yield
        finally:
            self._screen.end()

    @contextlib.contextmanager
    def shown(self, plan: Plan, folder: Path) -> Iterator[Screen]:
        """Show the run in `folder` while the body runs it."""
        self._screen = Harmless(lambda: self._made(plan, folder))
        if plan.view.device != "cpu":
            self._screen = _Recording(self._screen, folder)
        try:
            yield self._screen
        finally:
            self._screen.close()

    def _made(self, plan: Plan, folder: Path) -> Screen:
        if self._choice in ("lines", "quiet"):
            return Screen()
        run = Run(folder, {planned.slot: planned.use for planned in plan.slots})
        if self._events is not None:
            from pipeline.view.events import JsonScreen

            return JsonScreen(run, self._events)
        from pipeline.view.live import Header
        from pipeline.view.live_screen import LiveScreen

        view = plan.view
        wraps = (
            planned.use for planned in plan.slots if issubclass(planned.gives or object, Engine)
        )
        parts = next(wraps, ""), plural(view.procs, "process"), view.device
        where = ", ".join(filter(None, parts))
        return LiveScreen(run, Header(name=folder.name, where=where))


def _choice(*, quiet: bool, json: bool) -> Choice:
    """Return what to show: a live display in a terminal that can draw, lines elsewhere."""
    if json:
        return "json"
    if quiet:
        return "quiet"
    draws = sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    return "live" if draws and not is_worker() else "lines"


def _set_aside_stdout() -> TextIO:
    """Return this process's standard output, whose descriptor leads to standard error from now
    on."""
    sys.stdout.flush()
    aside = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return aside
