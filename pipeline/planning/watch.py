"""What planners are given for a trace or a profile, and tell of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much of a training is wanted."""

    blocks: int | None = None
    """The model's first so many; None: all."""
    samples: int | None = None
    """One micro-batch of so many, without an update; None: two steps as the recipe has them."""


class PhaseListener(ABC):
    """Is told where a training is."""

    @abstractmethod
    def phase(self, name: str) -> None:
        """What comes now belongs to this phase."""
