"""The artifact that stages of this kind give."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from pipeline.artifacts import Durable
from pipeline.errors import StageError
from pipeline.files import replace_text

FILE = "evaluation.json"
"""In the run's folder: slot -> what its stage has measured."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel(Durable):
    """What was measured of an exported model."""

    file: Path
    """Where it is written down, under the slot's name."""
    slot: str
    results: Mapping[str, Any]
    """JSON."""

    def save(self) -> None:
        """Write the results beside those of other slots (rank 0)."""
        known = _read(self.file) | {self.slot: dict(self.results)}
        replace_text(self.file, json.dumps(known, indent=1, allow_nan=False) + "\n")

    def record(self) -> dict[str, Any]:
        return {"file": str(self.file), "slot": self.slot, "sum": _sum(self.results)}

    @classmethod
    def restore(cls, record: Mapping[str, Any]) -> EvaluatedModel:
        file, slot = Path(record["file"]), record["slot"]
        known = _read(file)
        if slot not in known:
            raise StageError(f"the evaluation is gone: {file} has nothing of slot `{slot}`")
        if record.get("sum") not in (None, _sum(known[slot])):  # earlier versions recorded none
            raise StageError(f"{file}: slot `{slot}` has other results than were measured")
        return cls(file=file, slot=slot, results=known[slot])


def _sum(results: Mapping[str, Any]) -> str:
    return xxh3_64_hexdigest(json.dumps(results, sort_keys=True).encode())


def _read(file: Path) -> dict[str, Any]:
    """Empty where there is none, or none that can be read."""
    try:
        known = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
