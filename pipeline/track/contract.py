"""A tracker, and the stage that names one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["finished", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The run that is tracked."""

    name: str
    """Name of its folder."""
    recipe: Mapping[str, Any]
    """The merged recipe as JSON, without the values of environment variables."""
    environment: Mapping[str, Any]
    """Packages and machine, as in `environment.json`."""
    folder: Path


class Tracker(ABC):
    """A run in another program. Its methods are called one after another, in a separate process; an
    exception ends the tracking, and nothing else. Steps that a resumed run repeats are not sent
    again: an undisturbed resume repeats their numbers too. Steps after a rollback are sent again,
    with their other numbers. Whatever `log` has taken counts as sent."""

    @abstractmethod
    def open(self, run: RunFacts, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Begin, or continue in the run that an earlier call began. `state` is what that call
        returned, as JSON; empty the first time."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        """Log measurements of a step; `time` is in seconds since 1970. Names of a further training
        of the run begin with its slot (`chat/loss`), and its steps begin with 1 again."""

    def log_text(self, step: int, name: str, text: str) -> None:
        """Log a text that was generated at a step. Does nothing unless overridden."""

    @abstractmethod
    def close(self, outcome: Outcome) -> None:
        """Send everything that is left; the run has ended for now."""
