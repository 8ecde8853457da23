"""From pairs of blocks to a ratio with an interval and a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

FAST = 1.25
"""A calibration is fast up to this factor over the run's fastest decile."""
LIMIT = 1.03
"""What the training loop may cost: seconds over the bare loop's."""
FEWEST = 5
"""Pairs below which nothing is decided."""
RESAMPLES = 4000

Round = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Our loop against the bare one. Ratios are seconds over seconds, medians of pairs."""

    pairs: int
    kept: int
    """Pairs whose three calibrations all ran in the fast mode; the rest of this is about them."""
    ours: float
    bare: float
    """Median tokens per second over all ranks."""
    ratio: float
    low: float
    high: float
    """95 % bootstrap interval of the ratio (Efron 1979, percentile method)."""
    cpu_ratio: float
    loss_difference: float
    """Largest difference of losses between the two, relative: whether they do the same work."""
    verdict: str


def compare(rounds: Sequence[Round], block_tokens: int) -> Comparison:
    """`rounds` as `overhead_rank.measure` gives them. NaN where no pair was kept."""
    kept = fast_rounds(rounds)
    ratios = paired(kept, "seconds")
    low, high = interval(ratios)
    losses = [abs(r["ours"]["loss"] / r["bare"]["loss"] - 1) for r in rounds]
    return Comparison(
        pairs=len(rounds),
        kept=len(kept),
        ours=block_tokens / median([r["ours"]["seconds"] for r in kept]),
        bare=block_tokens / median([r["bare"]["seconds"] for r in kept]),
        ratio=median(ratios),
        low=low,
        high=high,
        cpu_ratio=median(paired(kept, "cpu")),
        loss_difference=max(losses),
        verdict=verdict(len(kept), low, high),
    )


def fast_rounds(rounds: Sequence[Round]) -> list[Round]:
    """Rounds without a slow calibration before, between or after their blocks."""
    every = [block[when] for r in rounds for block in r.values() for when in ("before", "after")]
    slowest = FAST * float(np.quantile(every, 0.1))
    return [
        r
        for r in rounds
        if all(max(block["before"], block["after"]) <= slowest for block in r.values())
    ]


def paired(rounds: Sequence[Round], what: str) -> list[float]:
    """Our loop's over the bare loop's, round by round."""
    return [r["ours"][what] / r["bare"][what] for r in rounds]


def median(values: Sequence[float]) -> float:
    """The median; NaN of nothing."""
    return float(np.median(values)) if values else float("nan")


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median, by resampling; NaN of nothing."""
    if not ratios:
        return float("nan"), float("nan")
    generator = np.random.default_rng(0)
    picks = generator.choice(np.asarray(ratios), (RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(picks, axis=1), [0.025, 0.975])
    return float(low), float(high)


def verdict(kept: int, low: float, high: float) -> str:
    """`within`, `over`, or `undecided` when the interval holds the limit or pairs are few."""
    if kept < FEWEST:
        return "undecided"
    if high <= LIMIT:
        return "within"
    return "over" if low > LIMIT else "undecided"


def as_row(label: str, comparison: Comparison) -> dict[str, Any]:
    """For the JSON file."""
    return {"configuration": label, **vars(comparison)}
