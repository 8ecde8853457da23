"""Who writes what, and whether that is everything."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.state.spans import WHOLE, Misfit, Span, require_cover, share_writing

SIZES = st.one_of(st.integers(1, 50), st.integers(WHOLE - 2, 6 * WHOLE))


@st.composite
def holdings(draw: st.DrawFn) -> list[list[Span]]:
    """What ranks hold: tensors cut into ranges, each range on one rank or more."""
    ranks = draw(st.integers(1, 6))
    held: list[list[Span]] = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(1, 8))):
        lengths = draw(st.lists(SIZES, min_size=1, max_size=4))
        for start, length in zip(itertools.accumulate([0, *lengths]), lengths, strict=False):
            span = Span(f"weight/{number}", start, start + length)
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                held[rank].append(span)
    return [draw(st.permutations(spans)) for spans in held]


def within(part: Span, whole: Span) -> bool:
    return part.key == whole.key and whole.start <= part.start and part.stop <= whole.stop


@given(holdings())
def test_everything_is_written_once_by_who_holds_it(held: list[list[Span]]) -> None:
    shares = share_writing(held)
    for spans, share in zip(held, shares, strict=True):
        places = [
            next(place for place, span in enumerate(spans) if within(part, span)) for part in share
        ]
        assert places == sorted(set(places))  # in the order of what the rank holds, none twice
    for key in {span.key for spans in held for span in spans}:
        total = max(span.stop for spans in held for span in spans if span.key == key)
        ranges = [(s.start, s.stop) for share in shares for s in share if s.key == key]
        require_cover(ranges, total)
        assert all(start < stop for start, stop in ranges)


@given(holdings())
def test_the_work_is_balanced(held: list[list[Span]]) -> None:
    """Replicas of everything: no rank writes more than its share and one uncut range."""
    everything = sorted({span for spans in held for span in spans})
    shares = share_writing([everything] * len(held))
    loads = [sum(span.stop - span.start for span in share) for share in shares]
    assert max(loads) - min(loads) <= WHOLE * len(held) + len(everything)


@given(holdings())
def test_ranks_agree(held: list[list[Span]]) -> None:
    """Each computes it from what travelled as JSON."""
    told = [[Span(*span) for span in rank] for rank in json.loads(json.dumps(held))]
    assert share_writing(told) == share_writing(held)


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
        with pytest.raises(Misfit):
            require_cover(ranges[:place] + ranges[place + 1 :], total)
        with pytest.raises(Misfit, match="are there twice"):
            require_cover([*ranges, ranges[place]], total)
    with pytest.raises(Misfit, match="ends at element"):
        require_cover(ranges, total + 1)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6), st.integers(0, 9))
def test_whatever_is_accepted_has_each_element_once(
    ranges: list[tuple[int, int]], total: int
) -> None:
    ranges = [(start, stop) for start, stop in ranges if start < stop]
    elements = sorted(element for start, stop in ranges for element in range(start, stop))
    try:
        require_cover(ranges, total)
    except Misfit:
        assert elements != list(range(total))
    else:
        assert elements == list(range(total))
