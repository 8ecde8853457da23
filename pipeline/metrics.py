"""`metrics.jsonl`: one JSON object a line, written by rank 0."""

from __future__ import annotations

import json
import os
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
        kept = [line for line in self.path.read_text("utf-8").splitlines() if _until(line, step)]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, self.path)


def _until(line: str, step: int) -> bool:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return False
    return isinstance(record, dict) and record.get("step", 0) <= step
