"""What a run has done so far, one JSON object a line, so that a later process can go on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A slot that ran to its end: what it was (`digest`) and what durable result it left."""

    slot: str
    digest: str
    record: Mapping[str, Any] | None


class Journal:
    """Append-only; one writer (rank 0, or the launching process)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, event: str, **facts: Any) -> None:
        """Append an event and force it to disk."""
        line = json.dumps({"time": time.time(), "event": event, **facts})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def events(self) -> Iterator[dict[str, Any]]:
        """Events in order; a line that a crash cut short is passed over."""
        if not self.path.exists():
            return
        for line in self.path.read_text("utf-8").splitlines():
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(event, dict):
                yield event

    def finished(self) -> dict[str, Finished]:
        """The latest finish of every slot."""
        return {
            event["slot"]: Finished(
                slot=event["slot"], digest=event["digest"], record=event.get("record")
            )
            for event in self.events()
            if event.get("event") == "slot finished"
        }

    def last(self) -> dict[str, Any] | None:
        """The newest event."""
        return next(iter(reversed(list(self.events()))), None)
