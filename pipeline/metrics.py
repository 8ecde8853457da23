"""`metrics.jsonl`: one JSON object a line, written by rank 0."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Metrics:
    """Append-only metrics of a run. A path of None makes every call do nothing (ranks above 0)."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; it is on disk (not in a buffer of ours) when this returns."""
        if self.path is None:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def rewind(self, step: int) -> None:
        """Drop records later than `step`, and a line that a crash cut short, so that a resumed run
        leaves neither gaps nor duplicates."""
        if self.path is None or not self.path.exists():
            return
        kept = [record for record in records(self.path) if record.get("step", 0) <= step]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
        os.replace(temporary, self.path)


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file, in order; a line that a crash cut short is passed over."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict):
                yield record
