"""The mean speed of a training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

WEIGHTED = ("tokens_per_second", "mfu", "data_wait_share")
"""Fields of a step's record whose means are taken over time."""


@dataclass
class MeanSpeed:
    """Means over all steps so far, weighted by the time of each: `tokens_per_second` is the number
    of tokens divided by the time of training."""

    steps: int = 0
    """Steps whose time is known."""
    seconds: float = 0.0
    """Their time in seconds, evaluations and saves left out."""
    _sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Field -> sum of value times seconds, and sum of seconds."""

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]]) -> MeanSpeed:
        """Return the means over these steps' records."""
        speed = cls()
        for record in records:
            speed.add(record)
        return speed

    def add(self, record: Mapping[str, Any]) -> None:
        """Include a step's record; one without a time changes nothing."""
        seconds = record.get("step_seconds")
        if seconds is None:
            return
        self.steps += 1
        self.seconds += seconds
        for name in WEIGHTED:
            if record.get(name) is not None:
                total, time = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = total + record[name] * seconds, time + seconds

    def mean(self, name: str) -> float | None:
        """Return the mean of one of WEIGHTED over the steps that have it; None if none has."""
        total, time = self._sums.get(name, (0.0, 0.0))
        return total / time if time > 0 else None

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of a step; None before the first."""
        return self.seconds / self.steps if self.steps else None
