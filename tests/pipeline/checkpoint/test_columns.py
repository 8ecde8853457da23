"""Tensors that are divided by columns: who writes what, and any part of them read as it was."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import tracemalloc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from pipeline.checkpoint import block_sums, reader, sharing
from pipeline.checkpoint.division import Run
from pipeline.checkpoint.file_layout import FULL, SHARDED, FileLayout
from pipeline.checkpoint.local_store import LocalStore
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.restore import Restoration
from pipeline.checkpoint.sharing import Holders, share_writing
from pipeline.checkpoint.tiles import Tile, overlaps
from pipeline.contracts.engine import WEIGHT, Fragment
from tests.support.columns import KEY, NAME, content, fragments, write
from tests.support.cuts import Cut, elements
from tests.support.tier import examples

SIZES = st.integers(1, 9)


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> Cut:
    """Draw any cut of a tensor of one to three dimensions."""
    if shape is None:
        shape = draw(st.integers(1, 24)), *draw(st.lists(SIZES, max_size=2))
    dims = st.one_of(st.none(), st.integers(0, len(shape) - 1))
    replicas, shards, tp = (draw(st.integers(1, most)) for most in (3, 4, 4))
    return Cut(shape, replicas, shards, tp, draw(dims), draw(dims))


def divided(cut: Cut, *, reverse: bool = False) -> list[Run]:
    holders = Holders()
    for rank in range(cut.ranks):
        for tile in cut.tiles(rank)[:: -1 if reverse else 1]:
            holders.add(rank, tile, "weight/a")
    (runs,) = share_writing(holders, {"weight/a": cut.numel}, cut.ranks)
    return runs


@given(cuts(), st.booleans(), st.integers(1, 4))
@examples(150)
def test_everything_is_written_once_by_who_holds_it(cut: Cut, reverse: bool, worth: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "WORTH_A_CUT", worth)
        runs = divided(cut, reverse=reverse)
    written: Counter[int] = Counter()
    for rank in range(cut.ranks):
        held = set(cut.elements(rank))
        for run in runs:
            piece = run.of(rank)
            if piece is not None:
                assert (rank, piece) in list(run.find(0, cut.numel))
                assert set(elements(piece)) <= held
                assert any(is_within(piece, tile) for tile in cut.tiles(rank))
                written.update(elements(piece))
    assert written == Counter(range(cut.numel))


def is_within(piece: Tile, tile: Tile) -> bool:
    """Whether a piece's elements follow each other in a rank's tile: snapshots copy it so."""
    first = tile.position(piece.start)
    if first is None or first + piece.numel > tile.numel:
        return False
    return elements(piece) == [tile.element(first + at) for at in range(piece.numel)]


@given(cuts(), st.data())
def test_tiles(cut: Cut, data: st.DataObject) -> None:
    tile = data.draw(st.sampled_from([t for r in range(cut.ranks) for t in cut.tiles(r)] or [None]))
    if tile is None:
        return
    numbers = elements(tile)
    assert [tile.position(number) for number in numbers] == list(range(tile.numel))
    assert tile.end == numbers[-1] + 1
    assert all(tile.position(n) is None for n in range(cut.numel) if n not in set(numbers))
    low = data.draw(st.integers(0, cut.numel))
    other = Tile(low, data.draw(st.integers(low, cut.numel)))
    shared = Counter()
    for rows, run, here, pitch, there, step in overlaps(tile, other, tile.stride or cut.numel):
        for row in range(rows):
            one = [tile.element(here + row * pitch + n) for n in range(run)]
            assert one == [other.element(there + row * step + n) for n in range(run)]
            shared.update(one)
    assert shared == Counter(n for n in numbers if other.start <= n < other.stop)


@pytest.mark.parametrize(
    ("shape", "tp_dim", "shard_dim", "expected"),
    [
        ((8192, 4096), 1, 0, Run(0, 1 << 25, 1 << 22, 0, 8, 2, 64, 4096, 8, 1)),
        ((8192, 4096), 0, 0, Run(0, 1 << 25, 1 << 22, 0, 1, 8, 8)),
        ((8192, 4096), None, 0, Run(0, 1 << 25, 1 << 22, 0, 8, 8, 1)),
        ((4096,), None, 0, Run(0, 4096, 512, 0, 8)),
        ((504, 4096), 0, 0, Run(0, 504 << 12, 63 << 12, 0, 1, 8, 8, 4096)),
        ((500, 4096), 0, 0, Run(0, 500 << 12, 63 << 12, 0, 1, 8, 8, 4096)),
        ((500, 4096), 1, 0, Run(0, 500 << 12, 63 << 12, 0, 8, 1, 0, 4096, 8, 1)),
        ((16, 1024, 1024), 2, 0, Run(0, 1 << 24, 1 << 21, 0, 8, 1, 0, 1024, 8, 1)),
        ((16, 1024, 1024), 2, 1, None),
        ((16, 1024, 1024), 0, 1, Run(0, 1 << 24, 1 << 21, 0, 1, 1, 0, 1 << 20, 8, 8)),
    ],
    ids=[
        "columns",
        "rows",
        "neither",
        "small",
        "rows that cuts do not divide",
        "uneven rows",
        "columns of uneven rows",
        "columns of experts",
        "columns and rows of experts",
        "experts and their rows",
    ],
)
def test_a_tensor_on_a_mesh_is_one_run(
    shape: tuple[int, ...], tp_dim: int | None, shard_dim: int, expected: Run | None
) -> None:
    """The mesh is 2 replicas of 8 shards of 8 tensor-parallel ranks."""
    runs = divided(Cut(shape, 2, 8, 8, shard_dim, tp_dim))
    assert runs == [expected] if expected else len(runs) == 16


FORMS = st.sampled_from([SHARDED, FULL])


@st.composite
def journeys(draw: st.DrawFn) -> tuple[Cut, Cut]:
    """Draw two cuts of one tensor, of up to some blocks of checksums."""
    before = draw(cuts())
    wider = *before.shape[:-1], before.shape[-1] * draw(st.sampled_from([1, 1, 30, 1000]))
    before = dataclasses.replace(before, shape=wider)
    return before, draw(cuts(wider))


@given(journeys(), FORMS, st.booleans(), st.data())
@examples(30)
def test_whatever_was_written_is_read(
    journey: tuple[Cut, Cut], form: FileLayout, passes: bool, data: st.DataObject
) -> None:
    before, after = journey
    flat = content(before)
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "WORTH_A_CUT", data.draw(st.sampled_from([1, 100, 1 << 18])))
        write(Path(root), before, form, passage=3 * block_sums.BLOCK if passes else None)
        patch.setattr(block_sums, "CHUNK", block_sums.BLOCK * data.draw(st.integers(1, 3)))
        patch.setattr(reader, "LONG", data.draw(st.sampled_from([1, 100, 1 << 20])))
        opened = CheckpointReader(LocalStore(root), NAME)
        good: list[int] = []
        opened.verify(good.append)
        assert sum(good) == flat.numel() * 4
        for low, high in ((0, before.numel), *data.draw(some_ranges(before.numel))):
            found = [(first, bytes(part)) for first, part in opened.read(KEY, low, high)]
            assert [first for first, _ in found] == list(
                itertools.accumulate((len(part) // 4 for _, part in found), initial=low)
            )[:-1]
            assert b"".join(part for _, part in found) == flat[low:high].numpy().tobytes()
        for rank in range(after.ranks):
            for fragment in fragments(after, rank, flat):
                live = torch.full_like(fragment.state[WEIGHT], -1)
                fill(opened, fragment, live)
                assert torch.equal(live, fragment.state[WEIGHT])
        opened.close()


def some_ranges(numel: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    edges = st.tuples(st.integers(0, numel), st.integers(0, numel))
    return st.lists(edges.map(lambda pair: (min(pair), max(pair))), max_size=4)


def fill(opened: CheckpointReader, fragment: Fragment, live: torch.Tensor) -> None:
    """Restore a tensor as a rank does."""
    ctx: Any = SimpleNamespace(accept=())
    engine: Any = None
    store: Any = None
    Restoration(ctx, engine, store)._fill(opened, fragment, WEIGHT, live)


@pytest.mark.parametrize("form", [SHARDED, FULL], ids=lambda form: form.name)
def test_a_rank_reads_its_own_columns_alone(form: FileLayout, tmp_path: Path) -> None:
    cut = Cut((256, 1024), 1, 2, 4, 0, 1)
    write(tmp_path, cut, form)
    for rank in range(cut.ranks):
        opened = CheckpointReader(LocalStore(tmp_path), NAME)
        (fragment,) = fragments(cut, rank, content(cut))
        fill(opened, fragment, fragment.state[WEIGHT])
        assert opened.bytes_read == 256 * 1024 * 4 // cut.ranks


@pytest.mark.parametrize("rows", [2, 64])
def test_memory_does_not_grow_with_rows(rows: int, tmp_path: Path) -> None:
    """Rows are of 16 MiB, and of 1 MiB."""
    cut = Cut((rows, (1 << 23) // rows), 1, 1, 2, None, 1)
    write(tmp_path, cut, SHARDED)
    opened = CheckpointReader(LocalStore(tmp_path), NAME)
    tracemalloc.start()
    count = sum(len(data) for _, data in opened.read(KEY, 0, cut.numel))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 4 << 23
    assert peak < block_sums.CHUNK + (1 << 20)
    assert opened.bytes_read < 1.1 * count


def test_names_in_files(tmp_path: Path) -> None:
    cut = Cut((6, 8), 1, 2, 2, 0, 1)
    write(tmp_path, cut, SHARDED)
    found = {}
    for file in sorted((tmp_path / NAME).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    whole = content(cut).view(6, 8)
    wanted = {
        f"weight/a@{row * 8 + column}x4/8": whole[row : row + 3, column : column + 4]
        for row in (0, 3)
        for column in (0, 4)
    }
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
