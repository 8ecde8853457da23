"""Arithmetic on half-open ranges of a flattened tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Span(NamedTuple):
    """Elements [start, stop) of the logical tensor `key`."""

    key: str
    start: int
    stop: int


class Misfit(ValueError):
    """Ranges overlap, leave a gap, or reach beyond the tensor."""

    tensor = 0
    """Its number, where there are several."""


def require_cover(ranges: Iterable[tuple[int, int]], total: int) -> None:
    """Raise Misfit unless the ranges are disjoint and together exactly [0, total)."""
    end = 0
    for start, stop in sorted(ranges):
        if start > end:
            raise Misfit(f"elements {end} to {start} are missing")
        if start < end:
            raise Misfit(f"elements {start} to {min(end, stop)} are there twice")
        end = stop
    if end != total:
        raise Misfit(f"ends at element {end} of {total}")
