"""The arithmetic of benchmarks/overhead.py: which pairs count, and the verdict from them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from overhead_stats import compare


def pair(ours: float, bare: float, *, loss: float = 5.0, **calibration: float) -> Any:
    """Return a block of ours and one of the bare loop, of seconds."""
    block = {"before": 1.0, "after": 1.0}
    own = {**block, **calibration, "loss": loss}
    return {
        "ours": {"seconds": ours, "cpu": ours, **own},
        "bare": {"seconds": bare, "cpu": bare, **block, "loss": 5.0},
    }


def test_a_loop_two_percent_slower_is_within_the_limit() -> None:
    found = compare([pair(2.04, 2.0) for _ in range(8)], block_tokens=100)
    assert (found.kept, found.ours, found.bare) == (8, 100 / 2.04, 50.0)
    assert found.low == found.high == pytest.approx(found.ratio) == pytest.approx(1.02)
    assert found.verdict == "within"


def test_pairs_next_to_a_slow_calibration_do_not_count() -> None:
    slow = [pair(9.0, 2.0, after=3.0), pair(9.0, 2.0, before=1.3)]
    found = compare([*slow, *(pair(2.0, 2.0) for _ in range(6))], 100)
    assert (found.pairs, found.kept, found.ratio) == (8, 6, 1.0)


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [([1.04] * 8, "over"), ([1.0] * 4, "undecided"), ([0.9, 1.2] * 3, "undecided")],
    ids=["slower", "too few", "too uneven"],
)
def test_verdicts(ratios: list[float], verdict: str) -> None:
    assert compare([pair(2.0 * ratio, 2.0) for ratio in ratios], 100).verdict == verdict


def test_without_any_fast_pair_nothing_is_said() -> None:
    found = compare([pair(1.0, 1.0, before=1.0 + n) for n in range(1, 9)], 100)
    assert (found.kept, found.verdict) == (0, "undecided")
    assert math.isnan(found.ratio)


def test_losses_show_whether_both_did_the_same_work() -> None:
    rounds = [pair(1.0, 1.0), pair(1.0, 1.0, loss=5.5)]
    assert compare(rounds, 100).loss_difference == pytest.approx(0.1)
