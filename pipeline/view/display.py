"""Output of a launching process about its run: a live display, lines of rank 0, or events as JSON.

The events (`pipe run --json`) are for other programs, one a line. Every event has `schema_version`,
`time` (seconds since 1970) and `event`. The version changes when a field is removed or means
something else; fields and kinds of events may be added. docs/running.md lists them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pipeline.contracts.engine import Engine
from pipeline.contracts.metrics import kind_of
from pipeline.distributed.environment import is_worker
from pipeline.execution.journal import command_begins
from pipeline.utils.terminal import set_display
from pipeline.utils.text import plural
from pipeline.view.run import LOOK_SECONDS, Run
from pipeline.view.screen import Screen, View

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan

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
        set_display(f"{shows} verbose" if verbose else shows)
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
        from pipeline.view.live import Header, LiveDisplay

        wraps = [one.use for one in plan.giving(Engine)]
        where = [*wraps[:1], plural(plan.view.procs, "process"), plan.view.device]
        return LiveDisplay(run, Header(name=folder.name, where=", ".join(filter(None, where))))


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
