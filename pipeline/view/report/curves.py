"""Curves of a run's measurements, with no more points than a screen can show."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_POINTS = 500
"""Points of a curve. Longer series are cut into this many parts, and each becomes its mean, its
least and its greatest value."""
DIGITS = 5
"""Significant digits of a value."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One measurement over training steps. None stands for what was no number."""

    steps: list[int]
    """The last step of each part."""
    mean: list[float | None]
    least: list[float | None]
    greatest: list[float | None]

    @property
    def known(self) -> list[float]:
        """All values that are numbers, the ranges' too."""
        return [value for value in (*self.mean, *self.least, *self.greatest) if value is not None]


def curve(
    records: Iterable[Mapping[str, Any]], name: str, *, unit: float = 1, most: int = MOST_POINTS
) -> Curve:
    """Return the curve of a field of `metrics.jsonl`, in multiples of `unit`, over the records that
    have it."""
    points = [
        (record["step"], None if record[name] is None else record[name] / unit)
        for record in records
        if name in record
    ]
    count = min(most, len(points))
    edges = [part * len(points) // count for part in range(count + 1)] if count else [0]
    parts = [points[a:b] for a, b in itertools.pairwise(edges)]
    return Curve(
        steps=[part[-1][0] for part in parts],
        mean=[_of(part, lambda values: math.fsum(values) / len(values)) for part in parts],
        least=[_of(part, min) for part in parts],
        greatest=[_of(part, max) for part in parts],
    )


def _of(part: Sequence[tuple[int, Any]], function: Callable[[list[float]], float]) -> float | None:
    values = [float(value) for _, value in part if value is not None]
    return rounded(function(values)) if values else None


def rounded(value: float) -> float:
    """Return a value with the digits that a curve has."""
    return float(f"{value:.{DIGITS}g}")
