from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.contracts.sample_order import SampleOrder
from tests.support.tier import examples

GOLDEN_SMALL = [2, 4, 3, 0, 5, 6, 1, 8, 9, 7, 9, 1, 5, 2, 6, 7, 0, 4, 3, 8]
GOLDEN_EDGE = [412, 549, 713, 98, 301, 277, 619, 73, 407, 454]
GOLDEN_LARGE = 185542508390

seeds = st.integers(-(2**70), 2**70)


def test_the_order_of_a_seed_never_changes() -> None:
    """Checkpoints hold positions in this order, so these values are frozen."""
    assert SampleOrder(0, 10).indices(0, 20).tolist() == GOLDEN_SMALL
    assert SampleOrder(42, 1000).indices(995, 10).tolist() == GOLDEN_EDGE
    assert SampleOrder(2**70 + 3, 10**12).indices(123_456_789_012_345, 1) == [GOLDEN_LARGE]


@examples(60)
@given(seed=seeds, size=st.integers(1, 5000), epoch=st.integers(0, 10**6))
def test_every_epoch_is_a_permutation(seed: int, size: int, epoch: int) -> None:
    indices = SampleOrder(seed, size).indices(epoch * size, size)
    assert indices.dtype == np.int64
    np.testing.assert_array_equal(np.sort(indices), np.arange(size))


@examples(60)
@given(seed=seeds, size=st.integers(1, 5000), start=st.integers(0, 10**12))
def test_indices_are_the_single_lookups(seed: int, size: int, start: int) -> None:
    order = SampleOrder(seed, size)
    assert order.indices(start, 7).tolist() == [
        int(order.indices(start + offset, 1)[0]) for offset in range(7)
    ]


@settings(deadline=None)
@given(seed=st.integers(0, 2**63), size=st.integers(50, 500), epoch=st.integers(0, 100))
def test_epochs_and_seeds_differ(seed: int, size: int, epoch: int) -> None:
    here = SampleOrder(seed, size).indices(epoch * size, size).tolist()
    assert here != SampleOrder(seed, size).indices((epoch + 1) * size, size).tolist()
    assert here != SampleOrder(seed + 1, size).indices(epoch * size, size).tolist()


@pytest.mark.parametrize("size", [2, 3, 5, 8, 17, 300])
def test_every_sample_is_equally_likely_at_every_position(size: int) -> None:
    epochs = 200_000 // size
    seen = SampleOrder(7, size).indices(0, epochs * size).reshape(epochs, size)
    counts = np.stack([np.bincount(seen[:, place], minlength=size) for place in range(size)])
    expected = epochs / size
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = (size - 1) ** 2
    # Chi-square has mean `freedom` and variance 2 * freedom.
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5


def test_neighbours_in_the_data_do_not_stay_neighbours() -> None:
    indices = SampleOrder(1, 4096).indices(0, 4096)
    adjacent = int((np.abs(np.diff(indices)) == 1).sum())
    assert adjacent < 12  # 2 are expected


def test_without_shuffling_samples_come_as_they_lie() -> None:
    assert SampleOrder(3, 4, shuffle=False).indices(2, 7).tolist() == [2, 3, 0, 1, 2, 3, 0]


def test_an_empty_stretch_is_empty() -> None:
    assert SampleOrder(3, 4).indices(5, 0).tolist() == []


def test_bounds() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        SampleOrder(0, 0)
    with pytest.raises(ValueError, match="count from 0"):
        SampleOrder(0, 1).indices(0, -1)
