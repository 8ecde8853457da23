"""Where a process's part of a sharded tensor lies in the full one, as few regular tiles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

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
    Raises StageError for partial sums, and for elements that lie in too many tiles."""
    if not isinstance(tensor, DTensor):
        return [Tile(0, tensor.numel())] if tensor.numel() else []
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, f"{name}: this process is outside of its mesh"
    found = _tiles(tuple(tensor.shape), *held_ranges(tensor, place, name))
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
        if low >= high:
            continue
        run = tile.stop - tile.start
        (first, left), (last, right) = divmod(low, run), divmod(high, run)
        # Rows: the first without its beginning, those between, the last without its end.
        spans = [(first, left, right, 1)]
        if first < last:
            between = first + (left > 0)
            spans = [(first, left, run, int(left > 0)), (between, 0, run, last - between)]
            spans.append((last, 0, right, int(right > 0)))
        for row, left, right, count in spans:
            if count:
                base = tile.start + row * tile.stride
                yield Tile(base + left, base + right, tile.stride, count)


def held_ranges(
    tensor: DTensor, place: Sequence[int], name: str = "a parameter"
) -> tuple[list[Ranges], set[int]]:
    """Ranges of each dimension that the process at a place of the mesh holds, in its order, empty
    ones where it has no elements; and the dimensions that are cut. Raises StageError for a
    placement that is no division.

    fully_shard cuts what tensor parallelism has cut before, whatever the order of the mesh's axes:
    of an axis whose placement is strided because a later axis cuts the same dimension, the later
    one cuts first, and then each part is cut by itself.
    """
    mesh = tensor.device_mesh
    ranges: list[Ranges] = [[(0, size)] if size else [] for size in tensor.shape]
    # (dimension, chunks that are each cut, axis) in the order of the cuts.
    cuts, late = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate() or mesh.size(axis) == 1:
            continue
        split = split_of(placement)
        if split is None:
            raise StageError(f"{name} is placed as {placement!r}, which cannot be saved")
        dim = placement.dim % tensor.ndim  # type: ignore[attr-defined]
        later = (number for number in range(axis + 1, mesh.ndim) if mesh.size(number) > 1)
        dims = [getattr(tensor.placements[number], "dim", None) for number in later]
        if split > 1 and any(one is not None and one % tensor.ndim == dim for one in dims):
            late.insert(0, (dim, 1, axis))
        else:
            cuts.append((dim, split, axis))
    for dim, split, axis in cuts + late:
        chunks = (_chunk(ranges[dim], split, number) for number in range(split))
        parts = (_chunk(chunk, mesh.size(axis), place[axis]) for chunk in chunks)
        joined: list[tuple[int, int]] = []
        for low, high in itertools.chain.from_iterable(parts):
            if joined and joined[-1][1] == low:
                low = joined.pop()[0]
            joined.append((low, high))
        ranges[dim] = joined
    return ranges, {dim for dim, _, _ in cuts + late}


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


def _tiles(shape: Sequence[int], ranges: Sequence[Ranges], cut: set[int]) -> Iterator[Tile]:
    """Tiles in local order. Dimensions after the last that is cut are whole, so that its ranges are
    columns of rows of the dimensions before it."""
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
