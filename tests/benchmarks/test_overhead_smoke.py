"""The arithmetic of benchmarks/overhead.py: which pairs count, and the verdict from them."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def stats() -> ModuleType:
    """Return the module."""
    import overhead_stats

    return overhead_stats


def block(seconds: float, *, before: float = 1.0, after: float = 1.0, loss: float = 5.0) -> Any:
    return {"seconds": seconds, "cpu": seconds, "before": before, "after": after, "loss": loss}


def pair(ours: float, bare: float, **more: float) -> Any:
    return {"ours": block(ours, **more), "bare": block(bare)}


def test_a_loop_two_percent_slower_is_within_the_limit(stats: ModuleType) -> None:
    found = stats.compare([pair(2.04, 2.0) for _ in range(8)], block_tokens=100)
    assert (found.kept, found.ours, found.bare) == (8, 100 / 2.04, 50.0)
    assert found.low == found.high == pytest.approx(found.ratio) == pytest.approx(1.02)
    assert found.verdict == "within"


def test_a_loop_four_percent_slower_is_over_it(stats: ModuleType) -> None:
    assert stats.compare([pair(2.08, 2.0) for _ in range(8)], 100).verdict == "over"


def test_pairs_beside_a_slow_calibration_do_not_count(stats: ModuleType) -> None:
    slow = [pair(9.0, 2.0, after=3.0), pair(9.0, 2.0, before=1.3)]
    found = stats.compare([*slow, *(pair(2.0, 2.0) for _ in range(6))], 100)
    assert (found.pairs, found.kept, found.ratio) == (8, 6, 1.0)


@pytest.mark.parametrize(
    "ratios", [[1.0] * 4, [0.9, 1.2, 0.9, 1.2, 0.9, 1.2]], ids=["too few", "too uneven"]
)
def test_what_cannot_be_told_is_undecided(stats: ModuleType, ratios: list[float]) -> None:
    assert stats.compare([pair(2.0 * r, 2.0) for r in ratios], 100).verdict == "undecided"


def test_without_any_fast_pair_nothing_is_said(stats: ModuleType) -> None:
    rounds = [pair(1.0, 1.0, before=1.0 + n) for n in range(1, 9)]
    found = stats.compare(rounds, 100)
    assert found.kept == 0
    assert math.isnan(found.ratio)
    assert found.verdict == "undecided"


def test_losses_show_whether_both_did_the_same_work(stats: ModuleType) -> None:
    rounds = [pair(1.0, 1.0), pair(1.0, 1.0, loss=5.5)]
    assert stats.compare(rounds, 100).loss_difference == pytest.approx(0.1)
