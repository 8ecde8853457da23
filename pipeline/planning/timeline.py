"""Phases of a training, and what memory holds when it holds the most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LOAD, FORWARD, BACKWARD = "load", "forward and loss", "backward"
UPDATE, SAVE, RESUME = "optimizer step", "checkpoint", "resume"
EXPORT, EVALUATION = "export", "evaluation"
STEP = (FORWARD, BACKWARD, UPDATE)
"""Phases of a training step."""

Place = Literal["device", "host", "disk"]
"""Memory of the accelerator, of its machine, or files of offloaded state."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one place holds at a time."""

    bytes: int
    items: Mapping[str, int]
    """Item -> bytes, of those that are not zero."""

    @classmethod
    def of(cls, items: Mapping[str, int]) -> Held:
        """The sum of some items."""
        held = {item: size for item, size in items.items() if size}
        return cls(bytes=sum(held.values()), items=held)
