"""The rule that divides the work: everything is written once, by a rank that holds it, whatever the
ranks hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint.division import CoverageError, Run, require_cover
from pipeline.checkpoint.sharing import WORTH_A_CUT, Holders, share_writing
from pipeline.checkpoint.tiles import Tile

SIZES = st.one_of(st.integers(1, 50), st.integers(WORTH_A_CUT - 2, 6 * WORTH_A_CUT))

Held = list[list[tuple[int, int, int]]]
"""Tensor, start and stop of each part, by rank."""


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
                held[rank].append((number, start, start + length))
        numels.append(sum(lengths))
    return [draw(st.permutations(spans)) for spans in held], numels


@st.composite
def meshes(draw: st.DrawFn) -> tuple[Held, list[int]]:
    """Draw tensors cut in equal parts over one axis of a mesh of ranks, and copied over the
    other."""
    shards, replicas = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    apart = draw(st.booleans())
    numels = draw(st.lists(SIZES, min_size=1, max_size=6))
    held: Held = [[] for _ in range(shards * replicas)]
    for number, numel in enumerate(numels):
        length = -(-numel // shards)
        for shard in range(shards):
            start, stop = min(shard * length, numel), min((shard + 1) * length, numel)
            for replica in range(replicas if start < stop else 0):
                rank = replica * shards + shard if apart else shard * replicas + replica
                held[rank].append((number, start, stop))
    return held, numels


def shared(held: Held, numels: list[int]) -> list[list[Run]]:
    holders = Holders()
    for rank, own in enumerate(held):
        for tensor, start, stop in own:
            holders.add(rank, Tile(start, stop), str(tensor))
    named = {str(tensor): numel for tensor, numel in enumerate(numels)}
    return share_writing(holders, named, len(held))


def load(runs: list[list[Run]], rank: int) -> int:
    """Elements that a rank writes."""
    return sum(piece.numel for own in runs for run in own if (piece := run.of(rank)))


def find(runs: list[Run], low: int, high: int) -> list[tuple[int, int, int]]:
    return [(rank, *tile[:2]) for run in runs for rank, tile in run.find(low, high)]


@given(st.one_of(irregular(), meshes()))
def test_everything_is_written_once_by_who_holds_it(case: tuple[Held, list[int]]) -> None:
    held, numels = case
    runs = shared(held, numels)
    written: dict[int, list[tuple[int, int, int]]] = {number: [] for number in range(len(numels))}
    for rank, spans in enumerate(held):
        parts = ((at, run.of(rank)) for at, own in enumerate(runs) for run in own)
        mine = [(at, *part[:2]) for at, part in parts if part]
        assert mine == sorted(mine)
        for tensor, start, stop in mine:
            assert any(tensor == t and low <= start < stop <= high for t, low, high in spans)
            written[tensor].append((start, stop, rank))
    for tensor, numel in enumerate(numels):
        require_cover([found[:2] for found in written[tensor]], numel)
        found = [(start, stop, rank) for rank, start, stop in find(runs[tensor], 0, numel)]
        assert found == sorted(written[tensor])


@given(meshes())
def test_a_tensor_on_a_mesh_is_one_run(case: tuple[Held, list[int]]) -> None:
    held, numels = case
    runs = shared(held, numels)
    assert [len(own) for own in runs] == [1] * len(numels)
    loads = [load(runs, rank) for rank in range(len(held))]
    assert max(loads) - min(loads) <= 5 * WORTH_A_CUT * len(numels) + max(numels)


@given(irregular())
def test_the_work_is_balanced(case: tuple[Held, list[int]]) -> None:
    """With replicas of everything, no rank writes more than its share and one uncut range."""
    held, numels = case
    everything = sorted({span for spans in held for span in spans})
    runs = shared([everything] * len(held), numels)
    loads = [load(runs, rank) for rank in range(len(held))]
    assert max(loads) - min(loads) <= WORTH_A_CUT * len(held) + len(everything) * len(held)


@given(meshes(), st.data())
def test_any_range_is_found(case: tuple[Held, list[int]], data: st.DataObject) -> None:
    held, numels = case
    runs = shared(held, numels)[0]
    low = data.draw(st.integers(0, numels[0] - 1))
    high = data.draw(st.integers(low + 1, numels[0]))
    every = find(runs, 0, numels[0])
    assert find(runs, low, high) == [piece for piece in every if piece[1] < high and low < piece[2]]


def gap(held: Held) -> None:
    held[1] = []


def overlap(held: Held) -> None:
    held[1][0] = (0, 40, 100)


def beyond(held: Held) -> None:
    held[1][0] = (0, 50, 101)


@pytest.mark.parametrize(
    ("change", "problem"), [(gap, "ends at"), (overlap, "there twice"), (beyond, "ends at")]
)
def test_what_does_not_make_up_a_tensor(change: Callable[[Held], None], problem: str) -> None:
    held: Held = [[(0, 0, 50)], [(0, 50, 100)]]
    assert shared(held, [100]) == [[Run(0, 100, 50, 0, 1)]]
    change(held)
    with pytest.raises(CoverageError, match=problem):
        shared(held, [100])
