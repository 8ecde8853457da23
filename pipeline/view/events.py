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

from pipeline.contracts.metrics import kind_of
from pipeline.execution.journal import command_begins
from pipeline.view.run import Run
from pipeline.view.screen import Now, Screen

SCHEMA_VERSION = 1


class JsonScreen(Screen):
    """Writes events to a stream: events of this start of the run, each once, in order of time."""

    def __init__(self, run: Run, out: TextIO) -> None:
        self._run, self._out = run, out
        self._newest: float | None = None
        """Time of the newest record that was written, or of the start of the run."""
        self._doing: dict[str, Any] = {}
        self._time_to_look = Now()
        self._write(_event("run", {"folder": str(run.folder), "slots": dict(run.uses)}))

    def refresh(self) -> None:
        if self._time_to_look():
            self.close()

    def close(self) -> None:
        self.end()
        doing = self._run.activity()
        if doing and doing != self._doing:
            self._write(_event("activity", doing))
        self._doing = doing

    def end(self) -> None:
        events, records, again = self._run.look()
        if self._newest is None:  # first from the newest start on, with the slots set aside for it
            events, self._newest = events[command_begins(events) :], self._run.now.started
        metrics = [_event(kind_of(one), one) for one in _timed(records, self._newest)]
        if again:  # the file begins with steps of earlier starts
            metrics = [one for one in metrics if one["time"] > self._newest]
        self._newest = max([self._newest, *(one["time"] for one in metrics)])
        news = [*(_event(one["event"], one) for one in events), *metrics]
        for one in sorted(news, key=lambda one: float(one["time"])):
            self._write(one)

    def _write(self, one: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(one, allow_nan=False) + "\n")


def _event(kind: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """An event of this kind with these facts; their own time counts if they have one."""
    rest = {name: value for name, value in facts.items() if name not in ("event", "xxh3")}
    return {"schema_version": SCHEMA_VERSION, "time": time.time(), "event": kind, **rest}


def _timed(records: Iterable[Mapping[str, Any]], time: float) -> Iterator[dict[str, Any]]:
    """Records with a time: one without (an earlier version's evaluation) takes the time of the
    record before it, the first one `time`."""
    for record in records:
        time = record.get("time", time)
        yield {**record, "time": time}
