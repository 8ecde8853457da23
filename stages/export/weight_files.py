"""Safetensors files: where each block lies, written by all ranks together, and read back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from xxhash import xxh3_64

from pipeline import DistContext, ExportError, TensorReader, TensorSpec
from pipeline.checkpoint import CODES, Entry, as_bytes, header
from pipeline.utils import open_regular, opened, page_aligned, read_at, write_at
from stages.export.manifest import BLOCK
from stages.model.declared import listed

Sums = dict[str, list[str]]
"""Tensor -> the checksum (XXH3, 64 bits, hexadecimal) of each of its blocks, in order."""

PIECE = 1 << 22
"""Bytes that are read, verified and written in turn. A thread for the writing was slower (it waits
for the interpreter after every call), and a process for it no faster than another rank."""


class Block(NamedTuple):
    """Block `number` of a tensor: `size` bytes at `offset` of the file, from element `start`."""

    file: str
    name: str
    number: int
    start: int
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One weight file with its tensors, in order."""

    file: str
    tensors: Mapping[str, TensorSpec]

    @property
    def size(self) -> int:
        """Bytes of tensors, without the header."""
        return sum(spec.nbytes for spec in self.tensors.values())

    @property
    def total(self) -> int:
        """Bytes of the whole file."""
        return len(self.header()) + self.size

    @property
    def entries(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> the format's name of the dtype, and the shape."""
        return {name: (CODES[spec.dtype], spec.shape) for name, spec in self.tensors.items()}

    def header(self) -> bytes:
        """The bytes that precede the tensors in the file."""
        entries = [
            Entry(name, *entry, self.tensors[name].nbytes) for name, entry in self.entries.items()
        ]
        return header(entries, metadata={"format": "pt"})

    def blocks(self) -> Iterator[Block]:
        """The blocks of all tensors, in the order of the file."""
        offset = len(self.header())
        for name, spec in self.tensors.items():
            for number, begin in enumerate(range(0, spec.nbytes, BLOCK)):
                size = min(BLOCK, spec.nbytes - begin)
                yield Block(self.file, name, number, begin // spec.dtype.itemsize, offset, size)
                offset += size


def share(blocks: Sequence[Block], rank: int, count: int) -> Sequence[Block]:
    """The consecutive blocks that `rank` of `count` works on."""
    return blocks[len(blocks) * rank // count : len(blocks) * (rank + 1) // count]


def write(
    folder: Path, parts: Sequence[Shard], reader: TensorReader, dist: DistContext,
    advance: Callable[[int], None],
) -> dict[str, Sums]:  # fmt: skip
    """Write files from `reader`, each rank its share of all blocks (collective): with as many files
    as ranks, mostly a file that no other rank locks. Returns by file the checksums of the bytes in
    memory. Calls `advance` with the bytes written. Raises OSError, StageError."""
    blocks = [block for part in parts for block in part.blocks()]
    if dist.is_main:
        for part in parts:
            with opened(folder / part.file, "wb", permissions=0o666) as out:
                out.write(part.header())
                out.truncate(part.total)
    dist.barrier()
    own = share(blocks, dist.rank, dist.world_size)
    mine: list[str] = []
    for file, blocks_of_file in itertools.groupby(own, lambda block: block.file):
        with opened(folder / file, "r+b") as out:
            for written in _write_blocks(out.fileno(), blocks_of_file, reader, advance):
                dist.heartbeat.beat()
                mine.append(written)
    found: dict[str, Sums] = {part.file: {} for part in parts}
    all_sums = itertools.chain.from_iterable(dist.gather(mine))
    for block, one in zip(blocks, all_sums, strict=True):
        found[block.file].setdefault(block.name, []).append(one)
    return found


def _write_blocks(
    out: int, blocks: Iterable[Block], reader: TensorReader, advance: Callable[[int], None]
) -> Iterator[str]:
    """Write each block and yield its checksum."""
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


def prove_files(
    folder: Path, parts: Sequence[Shard], sums: Mapping[str, Sums], dist: DistContext
) -> None:
    """Read every file back (collective): names, shapes, dtypes, bytes. Raises ExportError."""
    for part in parts:
        file, head = folder / part.file, part.header()
        try:
            with open_regular(file) as stream:
                planned = stream.read(len(head)) == head and file.stat().st_size == part.total
        except OSError as error:
            raise ExportError(f"{file} cannot be read back: {error}") from error
        if not planned:
            raise ExportError(f"{file} does not have the tensors or the size it was written with")
        wrong = check(file, part, sums[part.file], dist)
        if wrong:
            raise ExportError(
                f"{file} does not hold the trained values in {listed(wrong)}",
                hint="check the disk and the memory of this machine",
            )


def check(file: Path, part: Shard, sums: Sums, dist: DistContext) -> list[str]:
    """Names of tensors whose bytes differ from `sums`; no rank reads its own (collective)."""
    dist.heartbeat.beat()
    mine = share(list(part.blocks()), (dist.rank + 1) % dist.world_size, dist.world_size)
    buffer = page_aligned(PIECE)
    try:
        with open_regular(file) as stream:
            wrong = {b.name for b in mine if _differs(stream.fileno(), b, sums, buffer)}
    except OSError:
        wrong = {block.name for block in mine}
    return sorted({name for names in dist.gather(sorted(wrong)) for name in names})


def _differs(stream: int, block: Block, sums: Sums, buffer: memoryview) -> bool:
    digest = xxh3_64()
    for begin in range(0, block.size, PIECE):
        piece = buffer[: block.size - begin]
        found = read_at(stream, block.offset + begin, piece)
        digest.update(piece[:found])
    return sums.get(block.name, [])[block.number : block.number + 1] != [digest.hexdigest()]
