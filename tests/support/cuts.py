"""Tensors as meshes of ranks hold them: columns, rows or both of tensor-parallel matrices, with
copies; and checkpoints of one such tensor, written by the real writers in this process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from pipeline.checkpoint.division import Tile
from pipeline.checkpoint.file_layout import FileLayout, Staging, Write, plan_staging
from pipeline.checkpoint.location import Retention
from pipeline.checkpoint.snapshot import Snapshot
from pipeline.checkpoint.write_plan import HeldTile, divide, report
from pipeline.checkpoint.writer import SaveRequest, WriterSetup, carry_out
from pipeline.contracts.engine import WEIGHT, Fragment
from tests.support.tiny_store import job


@dataclass(frozen=True)
class Cut:
    """A tensor of `shape` on a mesh of ranks (replica, shard, tensor-parallel), the last numbered
    fastest.

    Dimension `tp_dim` is cut over the tensor-parallel ranks (None: copied), then `shard_dim` over
    the shards; flat ranges of what is left if `shard_dim` is None. Both as torch.chunk does.
    """

    shape: tuple[int, ...]
    replicas: int
    shards: int
    tp: int
    shard_dim: int | None
    tp_dim: int | None

    @property
    def ranks(self) -> int:
        return self.shards * self.replicas * self.tp

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def tiles(self, rank: int) -> list[Tile]:
        """Return the tiles that a rank holds, in the order of its local tensor."""
        shard = rank // self.tp % self.shards
        ranges = [(0, size) for size in self.shape]
        if self.tp_dim is not None:
            ranges[self.tp_dim] = _chunk(ranges[self.tp_dim], self.tp, rank % self.tp)
        if self.shard_dim is not None:
            ranges[self.shard_dim] = _chunk(ranges[self.shard_dim], self.shards, shard)
        dims = {self.tp_dim if self.tp > 1 else None, self.shard_dim if self.shards > 1 else None}
        tiles = list(_tiles(self.shape, ranges, max(dims - {None, 0}, default=0)))
        if self.shard_dim is None:
            total = sum(tile.numel for tile in tiles)
            tiles = list(_part(tiles, *_chunk((0, total), self.shards, shard)))
        return tiles

    def elements(self, rank: int) -> list[int]:
        """Return the numbers of the elements that a rank holds, in order."""
        return [n for tile in self.tiles(rank) for n in elements(tile)]


def elements(tile: Tile) -> list[int]:
    """Return the numbers of a tile's elements in order."""
    rows = range(tile.count)
    return [tile.start + row * tile.stride + n for row in rows for n in range(tile.run)]


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> Cut:
    """Draw any cut of a tensor of one to three dimensions."""
    if shape is None:
        shape = draw(st.integers(1, 24)), *draw(st.lists(st.integers(1, 9), max_size=2))
    dims = st.one_of(st.none(), st.integers(0, len(shape) - 1))
    replicas, shards, tp = (draw(st.integers(1, most)) for most in (3, 4, 4))
    return Cut(shape, replicas, shards, tp, draw(dims), draw(dims))


def _chunk(own: tuple[int, int], count: int, number: int) -> tuple[int, int]:
    low, high = own
    size = -(-(high - low) // count)
    return min(low + number * size, high), min(low + (number + 1) * size, high)


def _tiles(shape: Sequence[int], ranges: Sequence[tuple[int, int]], inner: int) -> Iterator[Tile]:
    """Yield the box as tiles; `inner` is the last dimension that is cut."""
    if any(low >= high for low, high in ranges):
        return
    below = math.prod(shape[inner + 1 :])
    width = shape[inner] * below if inner else 0
    low, high = (edge * below for edge in (ranges[inner] if ranges else (0, 1)))
    rows = [
        sum(at * math.prod(shape[dim + 1 : inner]) for dim, at in enumerate(place))
        for place in itertools.product(*(range(*own) for own in ranges[:inner]))
    ]
    if not inner:
        yield Tile(low, high)
        return
    for _, group in itertools.groupby(enumerate(rows), key=lambda item: item[1] - item[0]):
        first = [row for _, row in group]
        yield Tile(first[0] * width + low, first[0] * width + high, width, len(first))


def _part(tiles: Sequence[Tile], low: int, high: int) -> Iterator[Tile]:
    """Yield elements [low, high) of what the tiles hold: of each at most the end of a run, whole
    runs, and the start of a run."""
    begin = 0
    for tile in tiles:
        first, last = max(low - begin, 0), min(high - begin, tile.numel)
        begin += tile.numel
        while first < last:
            if not tile.stride:
                yield Tile(tile.start + first, tile.start + last)
                break
            column = first % tile.run
            rows = (last - first) // tile.run if column == 0 else 0
            start = elements(tile)[first]
            run = tile.run if rows else min(tile.run - column, last - first)
            yield Tile(start, start + run, tile.stride, max(rows, 1))
            first += run * max(rows, 1)


KEY = "weight/a"
NAME = "step-00000001"


def content(cut: Cut) -> Tensor:
    """Return the flattened tensor: numbers that differ from place to place."""
    return torch.arange(cut.numel, dtype=torch.int32) * 7 + 3


def fragments(cut: Cut, rank: int, flat: Tensor) -> Iterator[Fragment]:
    """Yield a rank's fragments, given the whole tensor."""
    for tile in cut.tiles(rank):
        own = flat.as_strided((tile.count, tile.run), (tile.stride, 1), tile.start).reshape(-1)
        yield Fragment(
            name="a", shape=cut.shape, start=tile.start, state={WEIGHT: own}, stride=tile.stride,
            count=tile.count,
        )  # fmt: skip


def write(root: Path, cut: Cut, form: FileLayout, *, passage: int | None = None) -> None:
    """Save as all ranks of the mesh do. With `passage`, all passes in rounds through a memory of so
    many bytes."""
    flat = content(cut)
    held = [
        [HeldTile(KEY, "I32", cut.shape, tile) for tile in cut.tiles(rank)]
        for rank in range(cut.ranks)
    ]
    shares = divide([report(own, []) for own in held], form, {})
    layouts = [
        form.lay_out(rank, shares.division.of_rank(rank), shares.tensors)
        for rank in range(cut.ranks)
    ]
    files = [file for layout in layouts for file in layout.described]
    template = shares.model_copy(update={"files": files})
    for rank in reversed(range(cut.ranks)):  # rank 0's writer waits for the others
        streamed = {KEY} if passage else frozenset[str]()
        staging = plan_staging(layouts[rank], streamed, passage or 0)
        setup = WriterSetup(
            store=str(root), rank=rank, world_size=cut.ranks, buffer_size=staging.size,
            files=layouts[rank].files, shared=layouts[rank].shared,
            rounds=staging.rounds, retention=Retention(),
            template=None if rank else template,
        )  # fmt: skip
        engine: Any = SimpleNamespace(
            fragments=lambda r=rank: fragments(cut, r, flat), random_stream=rank
        )
        dist: Any = SimpleNamespace(rank=rank, device=torch.device("cpu"))
        plan: Any = SimpleNamespace(template=template)
        snapshot = Snapshot(engine, dist, plan, staging)
        writer: Any = _Writer(snapshot, staging)
        snapshot.start(writer, job(1, "x"))
        outcome = carry_out(setup, job(1, "x"), memoryview(writer.memory), writer.writes)
        assert outcome.problem == ""
        snapshot.buffer.close()


class _Writer:
    """Keeps each round's bytes, as the real writer does on disk."""

    def __init__(self, snapshot: Snapshot, staging: Staging) -> None:
        self._snapshot = snapshot
        self._rounds = iter(staging.rounds)
        self.memory = bytearray()
        self.writes: list[Write] = []

    def announce(self, request: SaveRequest | None) -> None:
        del request
        for write in next(self._rounds):
            self.writes.append(write._replace(buffer_offset=len(self.memory)))
            self.memory += self._snapshot.buffer.memory[
                write.buffer_offset : write.buffer_offset + write.size
            ]

    def wait(self) -> None:
        return None
