"""What stages are told of a trace, and tell of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Depth:
    """How much of a model is wanted."""

    blocks: int | None = None
    """The first so many; None: all."""


class Watch(ABC):
    """Is told where a training is."""

    @abstractmethod
    def phase(self, name: str) -> None:
        """What comes now belongs to this phase."""
