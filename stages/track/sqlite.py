"""A tracker that is a SQLite file."""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.track import Outcome, RunFacts, Tracker, TrackerStage

SCHEMA = """
create table if not exists runs (
  run text primary key, name text not null, recipe text not null, environment text not null,
  outcome text);
create table if not exists metrics (
  run text not null, step integer not null, name text not null, value real not null,
  time real not null, primary key (run, step, name)) without rowid;
create table if not exists texts (
  run text not null, step integer not null, name text not null, text text not null,
  primary key (run, step, name)) without rowid;
"""


@dataclass(frozen=True, kw_only=True)
class TrackSqlite(TrackerStage):
    """Keep measurements in a SQLite file, in tables `runs`, `metrics` and `texts`.

    Several runs can write to one file, also at a time. `run` is a random text that tells runs
    apart whose folders have the same name.
    """

    file: str
    """The file; it is made if it is not there."""

    def tracker(self) -> Tracker:
        return SqliteTracker(Path(self.file))


@dataclass
class SqliteTracker(Tracker):
    """Writes each record in its own transaction."""

    path: Path
    _run: str = field(default="", init=False)

    def open(self, run: RunFacts, state: Mapping[str, Any]) -> Mapping[str, Any]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = sqlite3.connect(self.path, timeout=30)
        self._run = state.get("run") or uuid.uuid4().hex
        with self._file:
            self._file.executescript(SCHEMA)
            self._file.execute(
                "insert or replace into runs values (?, ?, ?, ?, null)",
                (self._run, run.name, json.dumps(run.recipe), json.dumps(run.environment)),
            )
        return {"run": self._run}

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        rows = [(self._run, step, name, value, time) for name, value in metrics.items()]
        with self._file:
            self._file.executemany("insert or replace into metrics values (?, ?, ?, ?, ?)", rows)

    def log_text(self, step: int, name: str, text: str) -> None:
        values = self._run, step, name, text
        with self._file:
            self._file.execute("insert or replace into texts values (?, ?, ?, ?)", values)

    def close(self, outcome: Outcome) -> None:
        with self._file:
            self._file.execute("update runs set outcome = ? where run = ?", (outcome, self._run))
        self._file.close()
