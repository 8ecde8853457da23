"""Curves of a page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.view.page import MOST_POINTS, curve


@given(
    st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=60),
    st.integers(1, 20),
)
def test_a_curve_keeps_range_and_ends(values: list[float | None], most: int) -> None:
    records = [{"step": number, "x": value} for number, value in enumerate(values, start=1)]
    found = curve(records, "x", most=most)
    assert len(found.steps) == min(most, len(values))
    assert found.steps[-1] == len(values)
    known = [value for value in values if value is not None]
    if known:
        least = min(value for value in found.least if value is not None)
        greatest = max(value for value in found.greatest if value is not None)
        assert least == pytest.approx(min(known), rel=1e-4, abs=1e-300)
        assert greatest == pytest.approx(max(known), rel=1e-4, abs=1e-300)
    else:
        assert found.mean == [None] * len(found.steps)


def test_few_points_are_as_they_were() -> None:
    records = [{"step": n, "loss": n / 8} for n in range(1, MOST_POINTS + 1)]
    found = curve([*records, {"step": 9, "loss": "a text"}, {"step": 9, "loss": True}], "loss")
    assert found.mean == found.least == found.greatest == [n / 8 for n in found.steps]
    assert len(found.steps) == MOST_POINTS
