"""Write safetensors files block by block, all ranks into the same file, and read them back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from xxhash import xxh3_64

from pipeline.artifacts import TensorReader
from pipeline.errors import StageError
from stages.export.layout import Block, Shard, share

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.dist import Dist

Sums = dict[str, list[str]]
"""Tensor -> the checksum (XXH3, 64 bits, hexadecimal) of each of its blocks, in order."""

READ = 1 << 22
"""Bytes read at a time."""


def write(
    file: Path, part: Shard, reader: TensorReader, dist: Dist, advance: Callable[[int], None]
) -> Sums:
    """Write the file from `reader`, each rank its share of the blocks (collective).

    Returns checksums of what was to be written, for the comparison with what a reader finds.
    `advance` is told the bytes that this rank has written. Raises OSError when the disk does not
    take it, StageError when the reader fails.
    """
    blocks = list(part.blocks())
    if dist.is_main:
        _create(file, part)
    dist.barrier()
    with file.open("r+b") as out:
        mine = [
            _write_block(out.fileno(), block, reader, advance)
            for block in share(blocks, dist.rank, dist.world_size)
        ]
    return _by_tensor(blocks, dist.gather(mine))


def check(file: Path, part: Shard, sums: Sums, dist: Dist) -> list[str]:
    """Names of the tensors whose bytes in the file are not those of `sums`, on every rank
    (collective). What one rank wrote another reads."""
    blocks = list(part.blocks())
    wanted = dict(zip(blocks, _in_order(blocks, sums), strict=True))
    mine = share(blocks, (dist.rank + 1) % dist.world_size, dist.world_size)
    try:
        with file.open("rb") as stream:
            wrong = {b.name for b in mine if _sum_of(stream.fileno(), b) != wanted[b]}
    except OSError:
        wrong = {block.name for block in mine}
    return sorted({name for names in dist.gather(sorted(wrong)) for name in names})


def _create(file: Path, part: Shard) -> None:
    head = part.header()
    with file.open("wb") as out:
        out.write(head)
        out.truncate(len(head) + part.size)


def _write_block(
    out: int, block: Block, reader: TensorReader, advance: Callable[[int], None]
) -> str:
    digest = xxh3_64()
    done = 0
    for chunk in reader.chunks(block.name, block.start, block.stop):
        data = _bytes(chunk)
        digest.update(data)
        while data:
            count = os.pwrite(out, data, block.offset + done)
            done, data = done + count, data[count:]
    if done != block.size:
        raise StageError(f"{block.name}: {done} bytes came where {block.size} were planned")
    advance(done)
    return digest.hexdigest()


def _sum_of(stream: int, block: Block) -> str:
    digest = xxh3_64()
    for begin in range(block.offset, block.offset + block.size, READ):
        digest.update(os.pread(stream, min(READ, block.offset + block.size - begin), begin))
    return digest.hexdigest()


def _by_tensor(blocks: Sequence[Block], shares: Iterable[list[str]]) -> Sums:
    found: Sums = {}
    sums = (one for share in shares for one in share)
    for block, one in zip(blocks, sums, strict=True):
        found.setdefault(block.name, []).append(one)
    return found


def _in_order(blocks: Sequence[Block], sums: Sums) -> Iterator[str]:
    left = {name: iter(own) for name, own in sums.items()}
    for block in blocks:
        yield next(left[block.name], "") if block.name in left else ""


def _bytes(chunk: Tensor) -> memoryview:
    """A flat tensor's memory."""
    return memoryview(chunk.detach().contiguous().view(torch.uint8).numpy())  # type: ignore[arg-type]
