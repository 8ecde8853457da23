"""The division of the work: everything is written once, by a rank that holds it, whatever the ranks
hold; the agreement before the first checkpoint does not grow with tensors times ranks. And random
generators, whose state is written too."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint import write_plan
from pipeline.checkpoint.division import Division, Piece, Tile, require_cover
from pipeline.checkpoint.file_layout import FULL, SHARDED, FileLayout
from pipeline.checkpoint.write_plan import (
    WORTH_A_CUT,
    HeldTile,
    apply_random,
    capture_random,
    divide,
    random_key,
    report,
    share_writing,
    start_random_streams,
)
from pipeline.errors import StageError
from tests.support.cuts import Cut, cuts, elements
from tests.support.tier import examples

SIZES = st.one_of(st.integers(1, 50), st.integers(WORTH_A_CUT - 2, 6 * WORTH_A_CUT))
SHAPES = [(f"weight/{number}", (4096 + number, 8)) for number in range(12)]
Held = list[list[tuple[int, Tile]]]
"""Tensor and tile of each part, by rank."""


@st.composite
def irregular(draw: st.DrawFn) -> tuple[Held, list[int]]:
    """Draw tensors cut into any ranges, each range on one or more ranks."""
    ranks = draw(st.integers(1, 6))
    held: Held = [[] for _ in range(ranks)]
    numels = []
    for number in range(draw(st.integers(1, 8))):
        lengths = draw(st.lists(SIZES, min_size=1, max_size=4))
        for start, length in zip(itertools.accumulate([0, *lengths]), lengths, strict=False):
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                held[rank].append((number, Tile(start, start + length)))
        numels.append(sum(lengths))
    return [draw(st.permutations(tiles)) for tiles in held], numels


def divided(held: Held, numels: list[int]) -> Division:
    """Divide as ranks with these reports do."""
    reports = [
        report([HeldTile(f"a/{n:03d}", "U8", (numels[n],), tile) for n, tile in own], [])
        for own in held
    ]
    shares = divide(reports, SHARDED, {})
    order = sorted(range(len(numels)), key=lambda n: shares.tensors[n].key)
    made = shares.division
    return Division.of([made.patterns[made.tensors[number]] for number in order])


def loads(division: Division, ranks: int) -> list[int]:
    """Elements that each rank writes."""
    return [sum(tile.numel for _, tile in division.of_rank(rank)) for rank in range(ranks)]


@given(irregular())
def test_ranges_are_written_once_by_who_holds_them(case: tuple[Held, list[int]]) -> None:
    held, numels = case
    division = divided(held, numels)
    for number, numel in enumerate(numels):
        pieces = division.patterns[division.tensors[number]]
        require_cover(pieces, numel)
        for rank, start, stop, *_ in pieces:
            assert any(
                n == number and low <= start < stop <= high for n, (low, high, *_) in held[rank]
            )


@given(cuts(), st.booleans(), st.integers(1, 4))
@examples(150)
def test_columns_are_written_once_by_who_holds_them(cut: Cut, reverse: bool, worth: int) -> None:
    holders: dict[Tile, list[int]] = {}
    for rank in range(cut.ranks):
        for tile in cut.tiles(rank)[:: -1 if reverse else 1]:
            holders.setdefault(tile, []).append(rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_plan, "WORTH_A_CUT", worth)
        (pieces,) = share_writing([0], [holders], cut.ranks).patterns
    written: Counter[int] = Counter()
    for piece in pieces:
        assert any(is_within(Tile(*piece[1:]), tile) for tile in cut.tiles(piece.rank))
        written.update(elements(Tile(*piece[1:])))
    assert written == Counter(range(cut.numel))


def is_within(piece: Tile, tile: Tile) -> bool:
    """Whether a piece's elements follow each other in a rank's tile: snapshots copy it so."""
    first = tile.position(piece.start)
    if first is None or first + piece.numel > tile.numel:
        return False
    return elements(piece) == elements(tile)[first : first + piece.numel]


@given(irregular())
def test_the_work_is_balanced(case: tuple[Held, list[int]]) -> None:
    """With replicas of everything, no rank writes more than its share and one uncut range."""
    held, numels = case
    everything = sorted({part for own in held for part in own})
    found = loads(divided([everything] * len(held), numels), len(held))
    assert max(found) - min(found) <= WORTH_A_CUT * len(held) + len(everything) * len(held)


@pytest.mark.parametrize(
    ("shape", "tp_dim", "shard_dim", "expected"),
    [
        ((8192, 4096), 1, 0, Piece(16, 2 << 22, (2 << 22) + 512, 4096, 512)),
        ((8192, 4096), None, 0, Piece(16, 2 << 22, (2 << 22) + (1 << 18))),
        ((4096,), None, 0, Piece(16, 1024, 1536)),
        ((16, 1024, 1024), 2, 0, Piece(16, 2 << 21, (2 << 21) + 128, 1024, 2048)),
    ],
    ids=["columns", "rows", "small", "experts"],
)
def test_replicas_share_large_tiles(
    shape: tuple[int, ...], tp_dim: int | None, shard_dim: int, expected: Piece
) -> None:
    """The mesh is 2 replicas of 8 shards of 8 tensor-parallel ranks."""
    cut = Cut(shape, 2, 8, 8, shard_dim, tp_dim)
    reports = [
        report([HeldTile("a/a", "F32", shape, tile) for tile in cut.tiles(rank)], [])
        for rank in range(cut.ranks)
    ]
    division = divide(reports, SHARDED, {}).division
    found = min(piece for piece in division.patterns[division.tensors[0]] if piece.rank >= 16)
    assert found == expected


def told(rank: int, ranks: int, dtype: str = "F32") -> tuple[bytes, bytes]:
    """Return the report of a rank with its rows of every tensor, and a generator."""
    own = []
    for key, (rows, columns) in SHAPES:
        chunk = -(-rows // ranks) * columns
        start, stop = min(rank * chunk, rows * columns), min((rank + 1) * chunk, rows * columns)
        if start < stop:
            own.append(HeldTile(key, dtype, (rows, columns), Tile(start, stop)))
    return report(own, [HeldTile(random_key(rank, "torch"), "U8", (9,), Tile(0, 9))])


@pytest.mark.parametrize("arrangement", [SHARDED, FULL], ids=lambda one: one.name)
def test_layouts_are_shared(arrangement: FileLayout) -> None:
    """A tensor has a layout of its own only if its shape is."""
    for ranks in (4, 700):
        shares = divide([told(rank, ranks) for rank in range(ranks)], arrangement, {})
        division, count = shares.division, len(SHAPES)
        assert [entry.key for entry in shares.tensors] == [
            *(key for key, _ in SHAPES), *(f"random/{rank:05d}/torch" for rank in range(ranks))
        ]  # fmt: skip
        assert [len(division.patterns[division.tensors[n]]) for n in range(count)] == [
            -(-rows // -(-rows // ranks)) for _, (rows, _) in SHAPES
        ]
        assert division.tensors[count:] == list(range(count, count + ranks))
        assert list(division.patterns[count:]) == [(Piece(rank, 0, 9),) for rank in range(ranks)]
    alike = [
        report([HeldTile(f"a/{n}", "F32", (8,), Tile(4 * r, 4 * r + 4)) for n in range(9)], [])
        for r in range(2)
    ]
    assert divide(alike, arrangement, {}).division == Division.of(
        [[Piece(0, 0, 4), Piece(1, 4, 8)]] * 9
    )


def test_ranks_that_do_not_fit_together() -> None:
    with pytest.raises(StageError, match="weight/0: ranks differ in its shape or dtype"):
        divide([told(0, 2), told(1, 2, "BF16")], SHARDED, {})
    with pytest.raises(StageError, match="the ranks' parts do not make up weight/0: ends at"):
        divide([told(0, 3), told(1, 3)], SHARDED, {})
    half = report([HeldTile("a/a", "F32", (100,), Tile(40, 100))], [])
    with pytest.raises(StageError, match="a/a: elements 40 to 50 are there twice"):
        divide([report([HeldTile("a/a", "F32", (100,), Tile(0, 50))], []), half], SHARDED, {})


def draws() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def test_every_generator_follows_the_number_and_its_state_can_be_put_back() -> None:
    start_random_streams(7)
    first = draws()
    saved = capture_random(torch.device("cpu"))
    second = draws()
    start_random_streams(8)
    assert not set(draws()) & {*first, *second}
    start_random_streams(7)
    assert draws() == first
    random.seed(0)
    apply_random(saved, torch.device("cpu"))
    assert draws() == second
