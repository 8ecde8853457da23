"""A launching process's view of the run that it has started."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

from pipeline.contracts.engine import Engine
from pipeline.distributed.environment import is_worker
from pipeline.errors import in_words
from pipeline.utils.terminal import set_display, shown
from pipeline.utils.text import plural
from pipeline.view.run import Run

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan

Choice = Literal["live", "lines", "quiet", "json"]
LONG = 1 << 16
"""Bytes of a line without an end of which only what is behind the last carriage return is kept."""
LOOK_SECONDS = 0.5
"""Seconds between two looks at the run's folder."""


class Screen:
    """Shows a run while its launcher waits for the ranks; this one leaves that to rank 0."""

    output: int | None = None
    """Descriptor for rank 0's standard output and error; None: the launcher's own."""

    def refresh(self) -> None:
        """Show what is new. Called often, and costs nothing when it is too early."""

    def close(self) -> None:
        """Show what the ranks have done last, and leave the terminal as it was."""

    def end(self) -> None:
        """Show how the run has ended, which its folder says by now."""

    def abandon(self) -> None:
        """Give this process its output back after a failure."""

    def printed(self) -> list[str]:
        """Return the lines that rank 0 has printed to `output` and that were not shown, so that it
        never waits to print."""
        return []


class Harmless(Screen):
    """A screen whose failure is told once and ends nothing else: a terminal that is gone, a reader
    of events that has ended. From then on rank 0's lines appear on standard error."""

    def __init__(self, make: Callable[[], Screen]) -> None:
        self._screen, self._failed = Screen(), False
        with self._guarded():
            self._screen = make()
        self.output = self._screen.output

    def refresh(self) -> None:
        if self._failed:
            self._pass_on()
        else:
            with self._guarded():
                self._screen.refresh()

    def close(self) -> None:
        with self._guarded():
            self._screen.close()
        if self._failed:
            self._pass_on()

    def end(self) -> None:
        if not self._failed:
            with self._guarded():
                self._screen.end()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # rich ends the program where nobody reads
            if not self._failed:
                self._failed = True
                with contextlib.suppress(Exception):
                    self._screen.abandon()
                _say(f"the display has ended: {in_words(error)}")

    def _pass_on(self) -> None:
        for line in self._screen.printed():
            _say(line)


def _say(line: str) -> None:
    """Print a line to standard error, if that can be."""
    with contextlib.suppress(Exception):
        print(shown(line), file=sys.stderr, flush=True)


class _Recording(Screen):
    """A screen during whose run this machine's GPUs are recorded, as long as that is possible."""

    def __init__(self, screen: Screen, folder: Path) -> None:
        from pipeline.execution.hardware_record import HardwareRecord

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
        run = Run(folder, {step.slot: step.use for step in plan.steps})
        if self._events is not None:
            from pipeline.view.events import JsonScreen

            return JsonScreen(run, self._events)
        from pipeline.view.live import Header
        from pipeline.view.live_screen import LiveScreen

        view = plan.view
        wraps = (step.use for step in plan.steps if issubclass(step.gives or object, Engine))
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


class Now:
    """Says whether it is time for another look."""

    def __init__(self, seconds: float = LOOK_SECONDS) -> None:
        self._seconds, self._looked = seconds, 0.0

    def __call__(self) -> bool:
        """Return whether the last time that this was true is long enough ago."""
        now = time.monotonic()
        if now - self._looked < self._seconds:
            return False
        self._looked = now
        return True


class LinePipe:
    """A pipe for another process's lines, which never makes this one wait."""

    SIZE = 1 << 20
    """Bytes that it holds while nobody reads, if the system allows as much."""

    def __init__(self) -> None:
        self._read, self.write = os.pipe()
        os.set_blocking(self._read, False)
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(self._read, fcntl.F_SETPIPE_SZ, self.SIZE)
        self._rest, self._closed = b"", False

    def lines(self) -> Iterator[str]:
        """Yield the complete lines that are new, without their ends; none once it is closed."""
        while not self._closed:
            try:
                data = os.read(self._read, 1 << 16)
            except BlockingIOError:
                return
            *whole, self._rest = (self._rest + data).split(b"\n")
            for line in whole:
                yield line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
            self._rest = self._rest.rpartition(b"\r")[2] if len(self._rest) > LONG else self._rest
            if not data:
                return

    def close(self) -> list[str]:
        """Return the lines that are left, an unfinished one too, and close both ends."""
        try:
            rest = [*self.lines()]
            return [*rest, self._rest.decode(errors="replace")] if self._rest else rest
        finally:
            self._closed = True
            for end in (self._read, self.write):
                os.close(end)
