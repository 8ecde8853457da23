"""`metrics.jsonl`: one JSON object a line, written by rank 0."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline import jsonl
from pipeline.files import replace_text


class Metrics:
    """Append-only metrics of a run. A path of None makes every call do nothing (ranks above 0)."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; it is not in a buffer of ours when this returns."""
        if self.path is not None:
            jsonl.append(self.path, record)

    def rewind(self, step: int) -> None:
        """Drop records later than `step`, and a line that a crash cut short, so that a resumed run
        leaves neither gaps nor duplicates."""
        if self.path is None or not self.path.exists():
            return
        kept = [record for record in jsonl.read(self.path) if record.get("step", 0) <= step]
        replace_text(self.path, "".join(json.dumps(r, allow_nan=False) + "\n" for r in kept))


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file, in order; a line that a crash cut short is passed over."""
    return jsonl.read(path)
