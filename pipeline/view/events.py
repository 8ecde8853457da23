"""A run as JSON, one event a line, for other programs (`pipe run --json`).

Every event has `schema_version`, `time` (seconds since 1970) and `event`. The version changes when
a field is removed or means something else; fields and kinds of events may be added. docs/events.md
lists them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from pipeline.execution.metrics import kind_of
from pipeline.view.follow import Follower
from pipeline.view.screen import Now, Screen

SCHEMA_VERSION = 1


def event(kind: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event of this kind with these facts; their own time counts if they have one."""
    rest = {name: value for name, value in facts.items() if name not in ("event", "xxh3")}
    return {"schema_version": SCHEMA_VERSION, "time": time.time(), "event": kind, **rest}


def news(run: Follower) -> Iterator[dict[str, Any]]:
    """Yield an event for everything that is new in a run's folder."""
    found = run.look()
    for record in found.events:
        yield event(record["event"], record)
    for record in found.metrics:
        yield event(kind_of(record), record)


class JsonScreen(Screen):
    """Writes events to a stream."""

    def __init__(self, run: Follower, out: TextIO) -> None:
        self._run, self._out = run, out
        self._doing: dict[str, Any] = {}
        self._time_to_look = Now()
        self._write(event("run", {"folder": str(run.folder), "slots": dict(run.slots)}))

    def refresh(self) -> None:
        if self._time_to_look():
            self._look()

    def close(self) -> None:
        self._look()

    def _look(self) -> None:
        for one in news(self._run):
            self._write(one)
        doing = self._run.activity()
        if doing and doing != self._doing:
            self._write(event("activity", doing))
        self._doing = doing

    def _write(self, one: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(one, allow_nan=False) + "\n")
