"""Safetensors files: planned, written by all ranks together a block at a time, and read back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from xxhash import xxh3_64

from pipeline import DistContext, ExportError, TensorReader, TensorSpec
from pipeline.checkpoint import CODES, DTYPES, Entry, as_bytes, header
from pipeline.utils import open_regular, opened, page_aligned, read_at, write_at
from stages.export.target import BLOCK, WeightFile
from stages.model.declared import listed

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


def shards(tensors: Mapping[str, TensorSpec], max_size: int) -> dict[str, WeightFile]:
    """Cut `tensors` into files of at most `max_size` bytes; a larger tensor has a file to itself.
    Wide dtypes come first, as the elements of a tensor must lie at multiples of their size."""
    groups: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, spec in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        if groups[-1] and filled + spec.nbytes > max_size:
            groups.append({})
            filled = 0
        groups[-1][name] = spec
        filled += spec.nbytes
    if len(groups) == 1:
        return {"model.safetensors": planned(groups[0])}
    names = (f"model-{n:05}-of-{len(groups):05}.safetensors" for n in itertools.count(1))
    return dict(zip(names, map(planned, groups), strict=False))


def planned(tensors: Mapping[str, TensorSpec]) -> WeightFile:
    """The file that will hold `tensors`, in order."""
    file = WeightFile(size=0, tensors={n: (CODES[s.dtype], s.shape) for n, s in tensors.items()})
    return file.model_copy(update={"size": len(head(file)) + data_size(file)})


def entries(file: WeightFile) -> list[Entry]:
    """The tensors of a file, in order."""
    return [
        Entry(name, code, shape, math.prod(shape) * DTYPES[code].itemsize)
        for name, (code, shape) in file.tensors.items()
    ]


def data_size(file: WeightFile) -> int:
    """Bytes of the tensors, without the header."""
    return sum(entry.size for entry in entries(file))


def head(file: WeightFile) -> bytes:
    """The bytes that precede the tensors in the file."""
    return header(entries(file), metadata={"format": "pt"})


def _blocks(name: str, file: WeightFile) -> Iterator[Block]:
    """The blocks of all tensors of the file `name`, in its order."""
    offset = len(head(file))
    for tensor, code, _, total in entries(file):
        for number, begin in enumerate(range(0, total, BLOCK)):
            size = min(BLOCK, total - begin)
            yield Block(name, tensor, number, begin // DTYPES[code].itemsize, offset, size)
            offset += size


def _share(blocks: Sequence[Block], rank: int, count: int) -> Sequence[Block]:
    """The consecutive blocks that `rank` of `count` works on."""
    return blocks[len(blocks) * rank // count : len(blocks) * (rank + 1) // count]


def write(
    folder: Path, files: Mapping[str, WeightFile], reader: TensorReader, dist: DistContext,
    advance: Callable[[int], None],
) -> dict[str, WeightFile]:  # fmt: skip
    """Write files from `reader`, each rank its share of all blocks (collective): with as many files
    as ranks, mostly a file that no other rank locks. Returns them with the checksums of the bytes
    in memory. Calls `advance` with the bytes written. Raises OSError, StageError."""
    blocks = [block for name, file in files.items() for block in _blocks(name, file)]
    if dist.is_main:
        for name, file in files.items():
            with opened(folder / name, "wb", permissions=0o666) as out:
                out.write(head(file))
                out.truncate(file.size)
    dist.barrier()
    mine: list[str] = []
    memory = torch.empty(PIECE, dtype=torch.uint8)
    own = _share(blocks, dist.rank, dist.world_size)
    for name, blocks_of_file in itertools.groupby(own, lambda block: block.file):
        with opened(folder / name, "r+b") as out:
            for block in blocks_of_file:
                digest, dtype = xxh3_64(), reader.spec(block.name).dtype
                for begin in range(0, block.size, PIECE):
                    piece = memory[: block.size - begin]
                    at = block.start + begin // dtype.itemsize
                    reader.read_into(block.name, at, piece.view(dtype))
                    data = as_bytes(piece)
                    digest.update(data)
                    write_at(out.fileno(), block.offset + begin, data)
                    advance(len(data))
                mine.append(digest.hexdigest())
                dist.heartbeat.beat()
    sums: dict[str, dict[str, list[str]]] = {name: {} for name in files}
    for block, one in zip(blocks, itertools.chain(*dist.gather(mine)), strict=True):
        sums[block.file].setdefault(block.name, []).append(one)
    return {n: file.model_copy(update={"sums": sums[n]}) for n, file in files.items()}


def prove_files(folder: Path, files: Mapping[str, WeightFile], dist: DistContext) -> None:
    """Read every file back (collective): names, shapes, dtypes, bytes. Raises ExportError."""
    for name, file in files.items():
        path, expected = folder / name, head(file)
        try:
            with open_regular(path) as stream:
                same = stream.read(len(expected)) == expected and path.stat().st_size == file.size
        except OSError as error:
            raise ExportError(f"{path} cannot be read back: {error}") from error
        if not same:
            raise ExportError(f"{path} does not have the tensors or the size it was written with")
        wrong = check(path, file, dist)
        if wrong:
            raise ExportError(
                f"{path} does not hold the trained values in {listed(wrong)}",
                hint="check the disk and the memory of this machine",
            )


def check(path: Path, file: WeightFile, dist: DistContext) -> list[str]:
    """Names of tensors whose bytes differ from the file's checksums; no rank reads what it wrote
    (collective)."""
    dist.heartbeat.beat()
    blocks = list(_blocks(path.name, file))
    mine = _share(blocks, (dist.rank + 1) % dist.world_size, dist.world_size)
    buffer, wrong = page_aligned(PIECE), set[str]()
    try:
        with open_regular(path) as stream:
            for block in mine:
                digest = xxh3_64()
                for begin in range(0, block.size, PIECE):
                    piece = buffer[: block.size - begin]
                    found = read_at(stream.fileno(), block.offset + begin, piece)
                    digest.update(piece[:found])
                known = file.sums.get(block.name, [])[block.number : block.number + 1]
                if known != [digest.hexdigest()]:
                    wrong.add(block.name)
    except OSError:
        wrong = {block.name for block in mine}
    return sorted({name for names in dist.gather(sorted(wrong)) for name in names})
