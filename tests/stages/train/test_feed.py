"""The order as the feed asks for it."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.contracts.sample_order import ENDLESS, SampleOrder
from stages.train.batches import STRETCH, IndexCache
from tests.support.tier import examples


@examples(20)
@given(
    size=st.integers(200, 9000),
    calls=st.lists(
        st.tuples(st.integers(0, 2 * STRETCH), st.integers(0, STRETCH + 9)), min_size=1, max_size=4
    ),
)
def test_a_stretch_gives_what_the_order_gives_wherever_it_is_asked(
    size: int, calls: list[tuple[int, int]]
) -> None:
    order = SampleOrder(3, size)
    stretch = IndexCache(order)
    for start, count in calls:
        assert stretch.indices(start, count).tolist() == order.indices(start, count).tolist()


def test_steps_in_sequence_compute_the_order_once() -> None:
    class Counting(SampleOrder):
        calls = 0

        def indices(self, start, count):  # type: ignore[no-untyped-def]
            Counting.calls += 1
            return super().indices(start, count)

    stretch = IndexCache(Counting(3, 2 * STRETCH))
    for step in range(STRETCH // 8):
        stretch.indices(step * 8, 8)
        stretch.indices(step * 8, 8)
    assert Counting.calls == 1


def test_a_stream_is_asked_for_no_more_than_is_needed() -> None:
    class Stream:
        size = ENDLESS
        asked: ClassVar[list[tuple[int, int]]] = []

        def indices(self, start: int, count: int) -> NDArray[np.int64]:
            self.asked.append((start, count))
            return np.arange(start, start + count)

    stretch = IndexCache(Stream())
    for step in range(3):
        for _ in range(2):
            assert stretch.indices(step * 8, 8).tolist() == [*range(step * 8, step * 8 + 8)]
    assert Stream.asked == [(0, 8), (8, 8), (16, 8)]
