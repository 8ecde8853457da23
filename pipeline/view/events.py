"""A run as JSON, one event a line, for other programs (`pipe run --json`).

Every event has `schema_version`, `time` (seconds since 1970) and `event`. The version changes when
a field is removed or means something else; fields and kinds of events may be added.
docs/running.md lists them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO

from pipeline.execution.journal import command_begins
from pipeline.execution.metrics import kind_of
from pipeline.view.follow import Follower
from pipeline.view.screen import Now, Screen

SCHEMA_VERSION = 1


def event(kind: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event of this kind with these facts; their own time counts if they have one."""
    rest = {name: value for name, value in facts.items() if name not in ("event", "xxh3")}
    return {"schema_version": SCHEMA_VERSION, "time": time.time(), "event": kind, **rest}


class News:
    """Events and records of this start of a run that were not told yet, in order of time."""

    def __init__(self, run: Follower) -> None:
        self._run = run
        self._told: float | None = None
        """Time of the newest record that was told, or of the start of the run."""

    def look(self) -> list[dict[str, Any]]:
        """Return an event for everything that is new in the run's folder."""
        found = self._run.look()
        # first from the newest start on, with the slots that were set aside for it
        begin = command_begins(found.events) if self._told is None else 0
        told = self._run.chain.started if self._told is None else self._told
        metrics = [event(kind_of(one), one) for one in _timed(found.metrics, told)]
        if found.again:  # the file begins with steps of earlier starts
            metrics = [one for one in metrics if one["time"] > told]
        self._told = max([told, *(one["time"] for one in metrics)])
        journal = [event(one["event"], one) for one in found.events[begin:]]
        return sorted([*journal, *metrics], key=lambda one: float(one["time"]))


def _timed(records: Iterable[Mapping[str, Any]], time: float) -> Iterator[dict[str, Any]]:
    """Yield records with a time: one without (an earlier version's evaluation) has that of the
    record before it, the first one `time`."""
    for record in records:
        time = record.get("time", time)
        yield {**record, "time": time}


class JsonScreen(Screen):
    """Writes events to a stream."""

    def __init__(self, run: Follower, out: TextIO) -> None:
        self._run, self._out = run, out
        self._news = News(run)
        self._doing: dict[str, Any] = {}
        self._time_to_look = Now()
        self._write(event("run", {"folder": str(run.folder), "slots": dict(run.slots)}))

    def refresh(self) -> None:
        if self._time_to_look():
            self._look()

    def close(self) -> None:
        self._look()

    def end(self) -> None:
        self._tell()

    def _look(self) -> None:
        self._tell()
        doing = self._run.activity()
        if doing and doing != self._doing:
            self._write(event("activity", doing))
        self._doing = doing

    def _tell(self) -> None:
        for one in self._news.look():
            self._write(one)

    def _write(self, one: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(one, allow_nan=False) + "\n")
