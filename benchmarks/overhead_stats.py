"""Ratio, interval and verdict from pairs of blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

FAST = 1.25
"""Largest ratio of a calibration to the run's fastest decile at which it counts as fast."""
LIMIT = 1.03
"""Largest accepted ratio of the training loop's seconds to the bare loop's."""
FEWEST = 5
"""Number of pairs below which there is no verdict."""
RESAMPLES = 4000

Round = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Our loop against the bare one. Ratios are of seconds, and medians of pairs."""

    pairs: int
    kept: int
    """Pairs whose three calibrations were all fast; the other fields are about these pairs."""
    ours: float
    bare: float
    """Median tokens per second over all ranks."""
    ratio: float
    low: float
    high: float
    """95 % bootstrap interval of the ratio (Efron 1979, percentile method)."""
    cpu_ratio: float
    loss_difference: float
    """Largest relative difference of losses between the two, which shows whether they do the same
    work."""
    verdict: str


def compare(rounds: Sequence[Round], block_tokens: int) -> Comparison:
    """Compare the rounds of `overhead_rank.measure`. NaN where no pair was kept."""
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
    """Return the rounds without a slow calibration before, between or after their blocks."""
    every = [block[when] for r in rounds for block in r.values() for when in ("before", "after")]
    slowest = FAST * float(np.quantile(every, 0.1))
    return [
        r
        for r in rounds
        if all(max(block["before"], block["after"]) <= slowest for block in r.values())
    ]


def paired(rounds: Sequence[Round], what: str) -> list[float]:
    """Return our loop's value over the bare loop's, round by round."""
    return [r["ours"][what] / r["bare"][what] for r in rounds]


def median(values: Sequence[float]) -> float:
    """Return the median; NaN of nothing."""
    return float(np.median(values)) if values else float("nan")


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by resampling; NaN of nothing."""
    if not ratios:
        return float("nan"), float("nan")
    generator = np.random.default_rng(0)
    picks = generator.choice(np.asarray(ratios), (RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(picks, axis=1), [0.025, 0.975])
    return float(low), float(high)


def verdict(kept: int, low: float, high: float) -> str:
    """Return `within`, `over`, or `undecided` when the interval contains the limit or pairs are
    few."""
    if kept < FEWEST:
        return "undecided"
    if high <= LIMIT:
        return "within"
    return "over" if low > LIMIT else "undecided"


def as_row(label: str, comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as a row of the JSON file."""
    return {"configuration": label, **vars(comparison)}
