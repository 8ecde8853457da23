"""Where a process's part of a sharded tensor lies in the full one, as few regular tiles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline import StageError
from pipeline.checkpoint import Tile
from stages.wrap.torch_compat import split_of

MOST_TILES = 1024
"""Largest number of tiles of one tensor on a rank; each is a line in write plans and manifests."""

Ranges = Sequence[tuple[int, int]]
"""Ranges [low, high) of a dimension, in the order in which they are held."""


def tiles_of(name: str, tensor: Tensor) -> list[Tile]:
    """The tiles that make up this process's elements, in their order here; none without any.

    Raises StageError for partial sums, and for elements that lie in too many tiles.
    """
    if not isinstance(tensor, DTensor):
        return [Tile(0, tensor.numel())] if tensor.numel() else []
    ranges, cut = _held(name, tensor, tensor.device_mesh.get_coordinate())
    found = _tiles(tuple(tensor.shape), ranges, cut)
    listed = list(itertools.islice(found, MOST_TILES + 1))
    if len(listed) > MOST_TILES:
        raise StageError(
            f"{name} is placed as {tensor.placements}: a rank's part of it lies in more than "
            f"{MOST_TILES} places, which cannot be saved"
        )
    here, expected = tensor.to_local().numel(), sum(tile.numel for tile in listed)
    assert here == expected, f"{name}: {here} elements are here, expected {expected}"
    return listed


def part_of(own: Iterable[Tile], start: int, stop: int) -> Iterator[Tile]:
    """The tiles of elements [start, stop) of a local tensor, all of whose tiles are `own`. The
    first run and the last may be cut."""
    begin = 0
    for tile in own:
        low, high = max(start - begin, 0), min(stop - begin, tile.numel)
        begin += tile.numel
        if low < high:
            yield from _runs(tile, low, high)


def _runs(tile: Tile, low: int, high: int) -> Iterator[Tile]:
    """Elements [low, high) of a tile."""
    run = tile.stop - tile.start
    (first, left), (last, right) = divmod(low, run), divmod(high, run)

    def found(row: int, begin: int, end: int, count: int = 1) -> Tile:
        base = tile.start + row * tile.stride
        return Tile(base + begin, base + end, tile.stride, count)

    if first == last:
        yield found(first, left, right)
        return
    if left:
        yield found(first, left, run)
        first += 1
    if first < last:
        yield found(first, 0, run, last - first)
    if right:
        yield found(last, 0, right)


def held_ranges(tensor: DTensor, place: Sequence[int]) -> list[Ranges]:
    """Ranges of each dimension that the process at a place of the mesh holds, in its order; empty
    ones where it has no elements. Raises StageError as `tiles_of` does."""
    return _held("a parameter", tensor, place)[0]


def _held(name: str, tensor: DTensor, place: Sequence[int] | None) -> tuple[list[Ranges], set[int]]:
    """Ranges of each dimension that the process at `place` holds, and the dimensions that are
    cut."""
    assert place is not None, f"{name}: this process is outside of its mesh"
    ranges: list[Ranges] = [[(0, size)] if size else [] for size in tensor.shape]
    cuts = list(_cuts(name, tensor, place))
    for dim, split, count, own in cuts:
        chunks = [_chunk(ranges[dim], split, number) for number in range(split)]
        ranges[dim] = _joined(part for chunk in chunks for part in _chunk(chunk, count, own))
    return ranges, {cut.dim for cut in cuts}


class _Cut(NamedTuple):
    """A dimension that is split into `split` chunks, each of which is cut into `count` parts; this
    process has part number `own` of each."""

    dim: int
    split: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    own: int


def _cuts(name: str, tensor: DTensor, place: Sequence[int]) -> Iterator[_Cut]:
    """The cuts that a mesh makes, in the order in which they are made.

    fully_shard cuts what tensor parallelism has cut before, whatever the order of the mesh's axes:
    of an axis whose placement is strided because a later axis cuts the same dimension, the later
    one cuts first, and then each part is cut by itself.
    """
    mesh, late = tensor.device_mesh, list[_Cut]()
    placements = list(enumerate(tensor.placements))
    for axis, placement in placements:
        if placement.is_replicate() or mesh.size(axis) == 1:
            continue
        split = split_of(placement)
        if split is None:
            raise StageError(f"{name} is placed as {placement!r}, which cannot be saved")
        dim = placement.dim % tensor.ndim  # type: ignore[attr-defined]
        own = place[axis]
        later = (one for number, one in placements[axis + 1 :] if mesh.size(number) > 1)
        again = any(getattr(one, "dim", dim + 1) % tensor.ndim == dim for one in later)
        if split > 1 and again:
            late.append(_Cut(dim, 1, mesh.size(axis), own))
        else:
            yield _Cut(dim, split, mesh.size(axis), own)
    yield from reversed(late)


def _chunk(ranges: Ranges, count: int, number: int) -> Ranges:
    """Chunk `number` of `count` by torch.chunk's rule, which DTensor follows."""
    size = -(-sum(high - low for low, high in ranges) // count)
    found, begin = [], 0
    for low, high in ranges:
        first = max(low, low + number * size - begin)
        last = min(high, low + (number + 1) * size - begin)
        if first < last:
            found.append((first, last))
        begin += high - low
    return found


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The ranges, with those that follow each other as one."""
    found: list[tuple[int, int]] = []
    for low, high in ranges:
        if found and found[-1][1] == low:
            found[-1] = found[-1][0], high
        else:
            found.append((low, high))
    return found


def _tiles(shape: Sequence[int], ranges: Sequence[Ranges], cut: set[int]) -> Iterator[Tile]:
    """Tiles in local order. Dimensions behind the last that is cut are whole, so that its ranges
    are columns of rows of the dimensions before it."""
    if not all(ranges) or 0 in shape:
        return
    inner = max(cut, default=0)
    below = math.prod(shape[inner + 1 :])
    columns = [(low * below, high * below) for low, high in (ranges[inner] if shape else [(0, 1)])]
    if inner == 0:
        yield from itertools.starmap(Tile, columns)
        return
    width = shape[inner] * below
    for first, count in _rows(shape[:inner], ranges[:inner]):
        # Several ranges of columns alternate in the local tensor, row by row.
        step = count if len(columns) == 1 else 1
        for row in range(first, first + count, step):
            for left, right in columns:
                yield Tile(row * width + left, row * width + right, width, step)


def _rows(shape: Sequence[int], ranges: Sequence[Ranges]) -> Iterator[tuple[int, int]]:
    """Rows of the given dimensions that are held, in order: the first of those that follow each
    other, and their number."""
    whole = len(shape)
    while whole > 1 and list(ranges[whole - 1]) == [(0, shape[whole - 1])]:
        whole -= 1
    below = math.prod(shape[whole:])
    held = ([n for part in own for n in range(*part)] for own in ranges[: whole - 1])
    for place in itertools.product(*held):
        row = 0
        for size, number in zip(shape, place, strict=False):
            row = row * size + number
        for low, high in ranges[whole - 1]:
            yield (row * shape[whole - 1] + low) * below, (high - low) * below
