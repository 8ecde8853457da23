"""Peaks of profiles, for any number of samples."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pipeline.planning.forecast import Line, Peak, fullest

lines = st.builds(Line, st.integers(-100, 1000), st.integers(0, 1000))
peaks = st.lists(st.builds(Peak, lines, st.integers(0, 50), st.integers(0, 50)), max_size=12)


@given(peaks, st.integers(1, 50), st.integers(0, 4), st.integers(0, 4))
def test_the_fullest_moments_are_enough(
    moments: list[Peak], samples: int, kept: int, passing: int
) -> None:
    def most(some: Any) -> int:
        sizes = (one.bytes.at(samples) + kept * one.arrived + passing * one.newest for one in some)
        return max(sizes, default=0)

    assert most(fullest(moments)) == most(moments)
