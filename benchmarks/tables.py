"""Medians of rounds, ratios within a round, and Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

Rounds = Mapping[int, float]
"""Number of a round -> what was measured in it."""


def median(rounds: Rounds) -> float:
    """NaN of nothing."""
    return statistics.median(rounds.values()) if rounds else float("nan")


def ratio(ours: Rounds, theirs: Rounds) -> float:
    """The median of the ratios within each round that has both; NaN without any."""
    pairs = {number: ours[number] / theirs[number] for number in ours if theirs.get(number)}
    return median(pairs)


def listed(rounds: Rounds, digits: int = 2) -> str:
    """Median and every value: `1.50 (1.62, 1.50, 1.41)`."""
    every = ", ".join(f"{rounds[number]:.{digits}f}" for number in sorted(rounds))
    return f"{median(rounds):.{digits}f} ({every})" if rounds else "-"


def mib(size: float) -> str:
    """Bytes in whole MiB."""
    return f"{size / (1 << 20):.0f}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
