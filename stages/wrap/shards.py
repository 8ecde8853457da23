"""This rank's elements of sharded tensors: where they lie in the full ones, as few regular tiles,
and how they are loaded from the model's source.

Every rank reads the bytes of its elements and no others, into the memory where they stay. Ranks
that hold the same elements share the reading and send each other what they read, unless reading is
faster than sending.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline import WEIGHT, Fragment, StageError
from pipeline.checkpoint import Tile
from pipeline.utils import BYTES, activity, local_part
from stages.wrap.torch_compat import split_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pipeline import Context, TensorReader

MOST_TILES = 1024
"""Largest number of tiles of one tensor on a rank; each is a line in write plans and manifests."""

Ranges = Sequence[tuple[int, int]]
"""Ranges [low, high) of a dimension, in the order in which they are held."""


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of all that a checkpoint of the model holds, tied ones once: parameters, then
    persistent buffers."""
    yield from module.named_parameters()
    persistent = module.state_dict(keep_vars=True)
    yield from (pair for pair in module.named_buffers() if pair[0] in persistent)


def flat(tensor: Tensor) -> Tensor:
    """This process's elements as a live, flat view."""
    return local_part(tensor).detach().view(-1)


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
        for box in Tile(low, high).boxes(tile.run) if low < high else ():
            first = tile.element(box.start)
            yield Tile(first, first + box.run, tile.stride, box.count)


def held_ranges(
    tensor: DTensor, place: Sequence[int], name: str = "a parameter"
) -> tuple[list[Ranges], set[int]]:
    """Ranges of each dimension that the process at a place of the mesh holds, in its order, empty
    ones where it has no elements; and the dimensions that are cut. Raises StageError for a
    placement that does not divide. fully_shard cuts what tensor parallelism has cut before,
    whatever the order of the mesh's axes: of an axis whose placement is strided because a later
    axis cuts the same dimension, the later one cuts first, and then each part is cut by itself."""
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


def tile_fragments(
    name: str, shape: Sequence[int], tiles: Iterable[Tile], state: Mapping[str, Tensor]
) -> Iterator[Fragment]:
    """A fragment for each tile of a tensor of full `shape`, of whose elements here `state` has the
    flat kinds."""
    end = 0
    for tile in tiles:
        begin, end = end, end + tile.numel
        yield Fragment(
            name=name,
            shape=tuple(shape),
            start=tile.start,
            state={kind: values[begin:end] for kind, values in state.items()},
            stride=tile.stride,
            count=tile.count,
        )


def weights_of(module: nn.Module) -> Iterator[Fragment]:
    """This rank's elements of every parameter and stored buffer. Raises StageError for a tensor
    whose elements have no regular place in it."""
    for name, tensor in stored_tensors(module):
        tiles = tiles_of(name, tensor)
        yield from tile_fragments(name, tensor.shape, tiles, {WEIGHT: flat(tensor)})


def load_weights(
    weights: Iterable[Fragment], reader: TensorReader, ctx: Context,
    replicas: ProcessGroup | None = None,
) -> None:  # fmt: skip
    """Overwrite the weights with the reader's values, cast to their dtype. Each fragment is filled
    before the next is taken. With `replicas`, the ranks that hold exactly the same elements, it is
    collective over them, and all fragments must stay valid. Raises StageError for files that cannot
    be read."""
    device, count = ctx.dist.device, 1 if replicas is None else replicas.size()
    if replicas is None or count == 1:
        _read(weights, reader, ctx)
        return
    # Shares of about as many elements: a fragment is in the share that its middle lies in.
    listed, rank, begin = list(weights), replicas.rank(), 0
    total = sum(one.state[WEIGHT].numel() for one in listed)
    shares: list[list[Fragment]] = [[] for _ in range(count)]
    for one in listed:
        numel = one.state[WEIGHT].numel()
        shares[min((begin + numel // 2) * count // max(total, 1), count - 1)].append(one)
        begin += numel
    if reader.as_stored and device.type == "cpu":
        # gloo sends 1 GB/s, the page cache 10. Each rank begins with another share, so that all of
        # them together read each byte from the disk once.
        _read(itertools.chain(*shares[rank:], *shares[:rank]), reader, ctx)
        return
    _read(shares[rank], reader, ctx)
    with torch.no_grad():
        for number, share in enumerate(shares):
            owner = torch.distributed.get_global_rank(replicas, number)
            for target in (one.state[WEIGHT] for one in share):
                # Offloaded values travel over the device's network too.
                value = target.to(device)
                torch.distributed.broadcast(value, src=owner, group=replicas)
                if value is not target:
                    target.copy_(value)


@torch.no_grad()
def _read(weights: Iterable[Fragment], reader: TensorReader, ctx: Context) -> None:
    before = reader.bytes_read
    with activity("loading weights", unit=BYTES) as loading:
        for one in weights:
            ctx.dist.heartbeat.beat()
            target, start, stride = one.state[WEIGHT], one.start, one.stride
            if reader.spec(one.name).dtype == torch.uint8:  # packed, whatever dtype holds the bytes
                start, stride = start * target.itemsize, stride * target.itemsize
                target = target.view(torch.uint8)
            for row, run in enumerate(target.view(one.count, -1)):
                reader.read_into(one.name, start + row * stride, run)
            loading.advance(reader.bytes_read - before)
            before = reader.bytes_read
    if reader.bytes_read:
        ctx.log.info("weights loaded: this process read %s", loading.summary())
