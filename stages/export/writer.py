"""Write safetensors files block by block, all ranks together, and read them back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from xxhash import xxh3_64

from pipeline.checkpoint.layout import as_bytes
from pipeline.contracts.tensors import TensorReader
from pipeline.utils.files import opened, page_aligned, read_at, write_at
from stages.export.layout import Block, Shard, share

if TYPE_CHECKING:
    from pipeline.distributed.process_group import DistContext

Sums = dict[str, list[str]]
"""Tensor -> the checksum (XXH3, 64 bits, hexadecimal) of each of its blocks, in order."""

PIECE = 1 << 22
"""Bytes that are read, verified and written in turn. A thread for the writing was slower (it waits
for the interpreter after every call), and a process for it no faster than another rank."""


def write(
    folder: Path, parts: Sequence[Shard], reader: TensorReader, dist: DistContext,
    advance: Callable[[int], None],
) -> dict[str, Sums]:  # fmt: skip
    """Write files from `reader`, each rank its share of all of their blocks (collective). With as
    many files as ranks, most of a share is in a file of its own, which no other rank locks.

    Returns checksums of what was to be written, by file, for the comparison with what a reader
    finds. `advance` is told the bytes that this rank has written. Raises OSError when the disk does
    not take it, StageError when the reader fails.
    """
    blocks = [block for part in parts for block in part.blocks()]
    if dist.is_main:
        for part in parts:
            _create(folder / part.file, part)
    dist.barrier()
    own = share(blocks, dist.rank, dist.world_size)
    mine: list[str] = []
    for file, blocks_of_file in itertools.groupby(own, lambda block: block.file):
        with opened(folder / file, "r+b") as out:
            mine += _write_blocks(out.fileno(), blocks_of_file, reader, advance)
    found: dict[str, Sums] = {part.file: {} for part in parts}
    all_sums = itertools.chain.from_iterable(dist.gather(mine))
    for block, one in zip(blocks, all_sums, strict=True):
        found[block.file].setdefault(block.name, []).append(one)
    return found


def check(file: Path, part: Shard, sums: Sums, dist: DistContext) -> list[str]:
    """Names of the tensors whose bytes in the file are not those of `sums`, on every rank
    (collective). What one rank wrote another reads."""
    blocks = list(part.blocks())
    wanted = dict(zip(blocks, _in_order(blocks, sums), strict=True))
    mine = share(blocks, (dist.rank + 1) % dist.world_size, dist.world_size)
    buffer = page_aligned(PIECE)
    try:
        with file.open("rb") as stream:
            wrong = {b.name for b in mine if _sum_of(stream.fileno(), b, buffer) != wanted[b]}
    except OSError:
        wrong = {block.name for block in mine}
    return sorted({name for names in dist.gather(sorted(wrong)) for name in names})


def _create(file: Path, part: Shard) -> None:
    head = part.header()
    with opened(file, "wb", permissions=0o666) as out:
        out.write(head)
        out.truncate(len(head) + part.size)


def _write_blocks(
    out: int, blocks: Iterable[Block], reader: TensorReader, advance: Callable[[int], None]
) -> Iterator[str]:
    """Write them; their checksums."""
    memory = torch.empty(PIECE, dtype=torch.uint8)
    for block in blocks:
        digest = xxh3_64()
        dtype = reader.spec(block.name).dtype
        for begin in range(0, block.size, PIECE):
            piece = memory[: block.size - begin]
            reader.read_into(block.name, block.start + begin // dtype.itemsize, piece.view(dtype))
            data = as_bytes(piece)
            digest.update(data)
            write_at(out, block.offset + begin, data)
            advance(len(data))
        yield digest.hexdigest()


def _sum_of(stream: int, block: Block, buffer: memoryview) -> str:
    digest = xxh3_64()
    for begin in range(0, block.size, PIECE):
        piece = buffer[: block.size - begin]
        found = read_at(stream, block.offset + begin, piece)
        digest.update(piece[:found])
    return digest.hexdigest()


def _in_order(blocks: Sequence[Block], sums: Sums) -> Iterator[str]:
    left = {name: iter(own) for name, own in sums.items()}
    for block in blocks:
        yield next(left[block.name], "") if block.name in left else ""
