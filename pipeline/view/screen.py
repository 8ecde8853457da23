"""Output of a launching process about its run: a live display, lines of rank 0, or events as JSON.

The events (`pipe run --json`) are for other programs, one a line. Every event has `schema_version`,
`time` (seconds since 1970) and `event`. The version changes when a field is removed or means
something else; fields and kinds of events may be added. docs/running.md lists them.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from pipeline.contracts.engine import Engine
from pipeline.contracts.metrics import kind_of
from pipeline.distributed.environment import is_worker
from pipeline.errors import in_words
from pipeline.execution.journal import command_begins
from pipeline.utils import terminal
from pipeline.utils.terminal import RedactingStream, bare, shown
from pipeline.utils.text import plural
from pipeline.view.run import LOOK_SECONDS, Run

if TYPE_CHECKING:
    from rich.console import Console

    from pipeline.chain.plan import Plan
    from pipeline.execution.gpu_records import HardwareRecord
    from pipeline.hardware.telemetry import GpuReading

GPU_SECONDS = 2.0
"""Seconds between two readings of the GPUs by a live display."""
LONG = 1 << 16
"""Bytes of an unfinished line from which on only the text after its last carriage return is
kept."""


class View:
    """A way to show a run. This one shows nothing: rank 0 prints lines where this process does."""

    prints = False
    """Whether it prints what rank 0 prints."""

    def refresh(self, lines: deque[str]) -> None:
        """Show what is new, and print and remove the lines of rank 0. Called often, and costs
        nothing when it is too early."""

    def close(self, lines: deque[str]) -> None:
        """Show what the ranks have done last, and leave the terminal as it was."""

    def end(self) -> None:
        """Show how the run has ended, which its folder says by now."""

    def abandon(self) -> None:
        """Give this process its output back after a failure."""


class Screen:
    """Shows a run while its launcher waits for the ranks, and records this machine's GPUs.

    A view that fails (a terminal that is gone, a reader of events that has ended) is reported once
    and stops nothing else; from then on rank 0's lines appear on standard error.
    """

    output: int | None = None
    """Descriptor for rank 0's standard output and error; None: this process's own."""

    def __init__(
        self, make: Callable[[], View] = View, recorder: HardwareRecord | None = None
    ) -> None:
        self._view, self._failed, self._recorder = View(), False, recorder
        self._pipe: LinePipe | None = None
        self._lines = deque[str]()
        with self._guarded():
            self._view = make()
            if self._view.prints:
                self._pipe = LinePipe()
                self.output = self._pipe.write

    def refresh(self) -> None:
        """Show what is new, and record the GPUs. Called often."""
        if self._recorder is not None:
            with contextlib.suppress(Exception):  # only people read it
                self._recorder.look()
        if self._pipe is not None:
            self._lines.extend(self._pipe.lines())
        if not self._failed:
            with self._guarded():
                self._view.refresh(self._lines)
        else:
            self._pass_on()

    def close(self) -> None:
        """Show what the ranks have done last, and leave the terminal as it was."""
        if self._pipe is not None:
            self._lines.extend(self._pipe.close())
        with self._guarded():
            self._view.close(self._lines)
        if self._failed:
            self._pass_on()

    def end(self) -> None:
        """Show how the run has ended."""
        if not self._failed:
            with self._guarded():
                self._view.end()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # rich ends the program where nothing reads
            if not self._failed:
                self._failed = True
                with contextlib.suppress(Exception):
                    self._view.abandon()
                _say(f"the display has ended: {in_words(error)}")

    def _pass_on(self) -> None:
        while self._lines:
            _say(self._lines.popleft())


def _say(line: str) -> None:
    with contextlib.suppress(Exception):
        print(shown(line), file=sys.stderr, flush=True)


class LinePipe:
    """A pipe for another process's lines, which never makes this one wait."""

    SIZE = 1 << 20
    """Bytes that it holds while no one reads, if the system allows as much."""

    def __init__(self) -> None:
        self._read, self.write = os.pipe()
        os.set_blocking(self._read, False)
        with contextlib.suppress(OSError):
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


SCHEMA_VERSION = 1


class Display:
    """Shows the run of this process as its user has asked for: at most one in a process."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False, json: bool = False) -> None:
        """Decide what to show, and say so to the ranks that this process will start, or to itself
        if it is one. With `json`, all that this process and its ranks print goes to standard error
        from now on, and events to what was standard output."""
        draws = sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        self._live = draws and not quiet and not json and not is_worker()
        shows = "json" if json else "quiet" if quiet else "live" if self._live else "lines"
        terminal.shows = f"{shows} verbose" if verbose else shows
        self._events: TextIO | None = None
        if json:
            sys.stdout.flush()
            self._events = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
            os.dup2(2, 1)
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
        recorder = None
        if plan.view.device != "cpu":
            from pipeline.execution.gpu_records import HardwareRecord

            recorder = HardwareRecord(folder)
        self._screen = Screen(lambda: self._view(plan, folder), recorder)
        try:
            yield self._screen
        finally:
            self._screen.close()

    def _view(self, plan: Plan, folder: Path) -> View:
        if self._events is None and not self._live:
            return View()
        run = Run(folder, {planned.slot: planned.use for planned in plan.slots})
        if self._events is not None:
            return JsonEvents(run, self._events)
        wraps = [one.use for one in plan.giving(Engine)]
        where = [*wraps[:1], plural(plan.view.procs, "process"), plan.view.device]
        return LiveDisplay(run, folder.name, ", ".join(filter(None, where)))


class JsonEvents(View):
    """Writes events to a stream: those since this start of the run, each once, by time."""

    def __init__(self, run: Run, out: TextIO) -> None:
        self._run, self._out, self._next_look = run, out, 0.0
        self._newest: float | None = None
        """Time of the newest record that was written, or of the start of the run."""
        self._activity: dict[str, Any] = {}
        self._write("run", {"folder": str(run.folder), "slots": dict(run.uses)})

    def refresh(self, lines: deque[str]) -> None:
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            self.close(lines)

    def close(self, lines: deque[str]) -> None:
        self.end()
        activity = self._run.activity()
        if activity and activity != self._activity:
            self._write("activity", activity)
        self._activity = activity

    def end(self) -> None:
        events, records, again = self._run.look()
        if self._newest is None:  # first from the newest start on, with the slots set aside for it
            events, self._newest = events[command_begins(events) :], self._run.now.started
        newest = when = self._newest
        found = [(float(one["time"]), one["event"], one) for one in events]
        for record in records:
            when = record.get("time", when)  # earlier versions wrote evaluations without a time
            if not again or when > newest:  # else of a start before
                found.append((float(when), kind_of(record), {**record, "time": when}))
                self._newest = max(self._newest, when)
        for _, kind, facts in sorted(found, key=lambda one: one[0]):
            self._write(kind, facts)

    def _write(self, kind: str, facts: Mapping[str, Any]) -> None:
        rest = {name: value for name, value in facts.items() if name not in ("event", "xxh3")}
        event = {"schema_version": SCHEMA_VERSION, "time": time.time(), "event": kind, **rest}
        self._out.write(json.dumps(event, allow_nan=False) + "\n")


class LiveDisplay(View):
    """Draws the run at the bottom of the terminal; what rank 0 and this process print goes above.

    Drawn by the thread that calls `refresh`, so nothing is drawn while that is busy.
    """

    prints = True

    def __init__(self, run: Run, name: str, where: str, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        from pipeline.hardware.telemetry import Telemetry
        from pipeline.view.live import ASCII, UNICODE, drawing

        self._run = run
        self._console = console or Console(file=bare(sys.stdout), highlight=False)
        marks = ASCII if self._console.options.ascii_only else UNICODE
        self._picture = functools.partial(drawing, run, name=name, where=where, marks=marks)
        self._live = Live(
            console=self._console, auto_refresh=False, redirect_stdout=False,
            redirect_stderr=False, vertical_overflow="crop",
        )  # fmt: skip
        self._telemetry = Telemetry()
        self._gpus: Sequence[GpuReading] = []
        self._next_drawing = self._next_reading = 0.0
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._live)
            stack.enter_context(_printing_above(self._console))
            self._stack = stack.pop_all()

    def refresh(self, lines: deque[str]) -> None:
        self._print(lines)
        if time.monotonic() >= self._next_drawing:
            self._draw()

    def close(self, lines: deque[str]) -> None:
        with self._stack:  # standard output is this process's again, whatever happens
            self._print(lines)
            self._draw()

    def abandon(self) -> None:
        self._stack.close()

    def _print(self, lines: deque[str]) -> None:
        from rich.text import Text

        while lines:  # one that cannot be printed stays
            self._console.print(Text(shown(lines[0])), soft_wrap=True)
            lines.popleft()

    def _draw(self) -> None:
        now = time.monotonic()
        self._next_drawing = now + LOOK_SECONDS
        if now >= self._next_reading:
            self._next_reading, self._gpus = now + GPU_SECONDS, self._telemetry.read()
        self._run.look()
        self._live.update(self._picture(gpus=self._gpus, width=self._console.width), refresh=True)


@contextlib.contextmanager
def _printing_above(console: Console) -> Iterator[None]:
    """Print what this process prints in the body above the display, redacted as before."""
    from rich.file_proxy import FileProxy

    def above(stream: TextIO) -> TextIO:
        return cast(TextIO, RedactingStream(cast(TextIO, FileProxy(console, bare(stream)))))

    before = sys.stdout, sys.stderr
    replaced = sys.stdout, sys.stderr = above(sys.stdout), above(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in replaced:
            stream.flush()
