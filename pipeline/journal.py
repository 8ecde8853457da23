"""What a run has done so far, one JSON object a line, so that a later process can go on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import jsonl


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A slot that ran to its end: what it was (`digest`) and what durable result it left."""

    slot: str
    digest: str
    record: Mapping[str, Any] | None


class Journal:
    """Append-only. Whoever holds the run's lock writes, and rank 0 while the ranks run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, event: str, **facts: Any) -> None:
        """Append an event and force it to disk."""
        jsonl.append(self.path, {"time": time.time(), "event": event, **facts}, sync=True)

    def events(self) -> Iterator[dict[str, Any]]:
        """Events in order; a line that a crash cut short is passed over."""
        return (event for event in jsonl.read(self.path) if "event" in event)

    def finished(self) -> dict[str, Finished]:
        """The latest finish of every slot."""
        return {
            event["slot"]: Finished(
                slot=event["slot"], digest=event["digest"], record=event.get("record")
            )
            for event in self.events()
            if event["event"] == "slot finished"
        }

    def running(self) -> str | None:
        """The slot that started last in the newest start of the run; None before the first."""
        slot = None
        for event in self.events():
            if event["event"] == "run started":
                slot = None
            elif event["event"] == "slot started":
                slot = event["slot"]
        return slot

    def ended_well(self) -> bool:
        """Whether the newest event is the end of a run in which every stage finished."""
        events = list(self.events())
        return bool(events) and events[-1]["event"] == "run finished"
