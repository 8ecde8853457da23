"""Medians of rounds, ratios within a round, and Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

Rounds = Mapping[int, float]
"""Round's number -> measured value."""


def median(rounds: Rounds) -> float:
    """Return the median; NaN of nothing."""
    return statistics.median(rounds.values()) if rounds else float("nan")


def ratio(ours: Rounds, theirs: Rounds) -> float:
    """Return the median ratio over the rounds that have both; NaN if there is none."""
    pairs = {number: ours[number] / theirs[number] for number in ours if theirs.get(number)}
    return median(pairs)


def listed(rounds: Rounds, digits: int = 2) -> str:
    """Return the median and every value: `1.50 (1.62, 1.50, 1.41)`."""
    every = ", ".join(f"{rounds[number]:.{digits}f}" for number in sorted(rounds))
    return f"{median(rounds):.{digits}f} ({every})" if rounds else "-"


def mib(size: float) -> str:
    """Return bytes in whole MiB."""
    return f"{size / (1 << 20):.0f}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
