"""Tiles of tensors, and the coverage of a tensor by them."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint.division import (
    CoverageError,
    Division,
    Piece,
    Tile,
    require_cover,
)
from tests.support.cuts import Cut, cuts, elements


@given(cuts(), st.data())
def test_tiles(cut: Cut, data: st.DataObject) -> None:
    tile = data.draw(st.sampled_from([t for r in range(cut.ranks) for t in cut.tiles(r)] or [None]))
    if tile is None:
        return
    numbers, width = elements(tile), tile.stride or math.prod(cut.shape[1:])
    assert [tile.position(number) for number in numbers] == list(range(tile.numel))
    assert tile.end == numbers[-1] + 1
    assert all(tile.position(n) is None for n in range(cut.numel) if n not in set(numbers))
    boxes = list(tile.boxes(width))
    assert [n for box in boxes for n in elements(box)] == numbers
    assert len(boxes) <= (1 if tile.stride else 3)
    low = data.draw(st.integers(0, cut.numel))
    other = Tile(low, data.draw(st.integers(low, cut.numel)))
    shared = Counter(n for one in tile.common(other, width) for n in elements(one))
    assert shared == Counter(n for n in numbers if other.start <= n < other.stop)
    begin = data.draw(st.integers(0, tile.numel))
    size = data.draw(st.integers(0, tile.numel - begin))
    parts = list(tile.segments(begin, size))
    assert [first + n for first, low, high in parts for n in range(high - low)] == numbers[
        begin : begin + size
    ]


@st.composite
def covers(draw: st.DrawFn) -> tuple[list[Tile], int]:
    edges = sorted({0, *draw(st.sets(st.integers(0, 60), max_size=8))})
    ranges = list(itertools.starmap(Tile, itertools.pairwise(edges)))
    return draw(st.permutations(ranges)), edges[-1]


@given(covers())
def test_a_cover_is_accepted_and_without_any_range_it_is_not(cover: tuple[list[Tile], int]) -> None:
    ranges, total = cover
    require_cover(ranges, total)
    for place in range(len(ranges)):
        with pytest.raises(CoverageError):
            require_cover(ranges[:place] + ranges[place + 1 :], total)
        with pytest.raises(CoverageError, match="are there twice"):
            require_cover([*ranges, ranges[place]], total)
    with pytest.raises(CoverageError, match="ends at element"):
        require_cover(ranges, total + 1)


TILES = st.builds(Tile, *[st.integers(0, 9)] * 2, st.sampled_from([0, 3]), st.integers(1, 3))


@given(st.lists(TILES, max_size=6), st.integers(0, 9))
def test_whatever_is_accepted_has_each_element_once(tiles: list[Tile], total: int) -> None:
    try:
        require_cover(tiles, total)
    except CoverageError:
        proper = all(t.run > 0 and (t.count == 1 or t.stride) for t in tiles)
        inside = proper and all(not t.stride or t.start % 3 + t.run <= 3 for t in tiles)
        columns = any(t.stride for t in tiles)
        assert not inside or (columns and total % 3) or found(tiles) != list(range(total))
    else:
        assert found(tiles) == list(range(total))


def found(tiles: list[Tile]) -> list[int]:
    return sorted(n for tile in tiles for n in elements(tile))


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        ([Piece(0, 0, 12)], "a: ends at element 12 of 24"),
        ([Piece(0, 0, 4, 8, 3), Piece(1, 4, 8, 4, 6)], "a: .*rows of different lengths"),
        ([Piece(0, 0, 2, 5, 5)], "a: 24 elements do not make whole rows"),
        ([Piece(0, 0, 1, 3, 8), Piece(1, 1, 3, 3, 8)], "a: is divided by columns of other rows"),
        ([Piece(0, 0, 4, 8, 3), Piece(2, 4, 8, 8, 3)], "a: divided among ranks that do not exist"),
        ([Piece(0, 0, 4, 8, 3), Piece(1, 4, 8, 8, 2)], "a: element 20 is missing"),
        ([Piece(0, 0, 4, 8, 3), Piece(1, 3, 8, 8, 3)], "a: element 3 is there twice"),
        ([Piece(0, 0, 4, 8, 3), Piece(1, 4, 8, 8, 4)], "a: reaches beyond element 24"),
        ([Piece(0, 4, 12, 8, 3)], "a: has no columns 4 to 12 in rows of 8"),
    ],
)
def test_tensors_that_are_not_whole(pieces: list[Piece], problem: str) -> None:
    with pytest.raises(CoverageError, match=problem):
        Division.of([pieces]).require_whole({"a": (3, 8)}, ranks=2)
