"""Whether ranges are everything."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint.manifest import CoverageError, require_cover


@st.composite
def covers(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    edges = sorted({0, *draw(st.sets(st.integers(0, 60), max_size=8))})
    ranges = list(itertools.pairwise(edges))
    return draw(st.permutations(ranges)), edges[-1]


@given(covers())
def test_a_cover_is_accepted_and_without_any_range_it_is_not(
    cover: tuple[list[tuple[int, int]], int],
) -> None:
    ranges, total = cover
    require_cover(ranges, total)
    for place in range(len(ranges)):
        with pytest.raises(CoverageError):
            require_cover(ranges[:place] + ranges[place + 1 :], total)
        with pytest.raises(CoverageError, match="are there twice"):
            require_cover([*ranges, ranges[place]], total)
    with pytest.raises(CoverageError, match="ends at element"):
        require_cover(ranges, total + 1)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6), st.integers(0, 9))
def test_whatever_is_accepted_has_each_element_once(
    ranges: list[tuple[int, int]], total: int
) -> None:
    ranges = [(start, stop) for start, stop in ranges if start < stop]
    elements = sorted(element for start, stop in ranges for element in range(start, stop))
    try:
        require_cover(ranges, total)
    except CoverageError:
        assert elements != list(range(total))
    else:
        assert elements == list(range(total))
