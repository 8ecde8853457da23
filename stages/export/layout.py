"""Which tensor goes to which file, and where in it, known before any weight is read."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pipeline.checkpoint.layout import CODES
from pipeline.checkpoint.safetensors_format import Entry, header
from pipeline.contracts.tensors import TensorSpec
from stages.export.manifest import BLOCK

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Named(NamedTuple):
    """A tensor as it is to be in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return TensorSpec(self.shape, self.dtype).nbytes


class Block(NamedTuple):
    """Elements [start, stop) of a tensor, at byte `offset` of the file."""

    file: str
    name: str
    start: int
    stop: int
    offset: int
    size: int
    """Bytes."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One weight file with its tensors, in order."""

    file: str
    tensors: Sequence[Named]

    @property
    def size(self) -> int:
        """Bytes of tensors, without the header."""
        return sum(tensor.size for tensor in self.tensors)

    def header(self) -> bytes:
        """What precedes the tensors in the file."""
        entries = [Entry(t.name, CODES[t.dtype], t.shape, t.size) for t in self.tensors]
        return header(entries, metadata={"format": "pt"})

    def blocks(self) -> Iterator[Block]:
        """All tensors, in pieces, in the order of the file."""
        offset = len(self.header())
        for tensor in self.tensors:
            step = BLOCK // tensor.dtype.itemsize
            count = TensorSpec(tensor.shape, tensor.dtype).numel
            for start in range(0, count, step):
                stop = min(start + step, count)
                size = (stop - start) * tensor.dtype.itemsize
                yield Block(self.file, tensor.name, start, stop, offset, size)
                offset += size


def shards(tensors: Iterable[Named], max_size: int) -> list[Shard]:
    """Cut `tensors` into files of at most `max_size` bytes, in order; a larger tensor is alone."""
    groups: list[list[Named]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.size > max_size:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.size
    if len(groups) == 1:
        return [Shard(file=SINGLE, tensors=groups[0])]
    count = len(groups)
    return [
        Shard(file=f"model-{number:05}-of-{count:05}.safetensors", tensors=group)
        for number, group in enumerate(groups, start=1)
    ]


def index(parts: Sequence[Shard]) -> Mapping[str, Any]:
    """Content of the index file of a model in several files."""
    return {
        "metadata": {"total_size": sum(part.size for part in parts)},
        "weight_map": {tensor.name: part.file for part in parts for tensor in part.tensors},
    }


def share(blocks: Sequence[Block], rank: int, count: int) -> Sequence[Block]:
    """The consecutive blocks that `rank` of `count` works on: about as many bytes as the others."""
    ends = list(itertools.accumulate(block.size for block in blocks))
    total = ends[-1] if ends else 0
    owner = [min((end - 1) * count // max(total, 1), count - 1) for end in ends]
    return [block for block, one in zip(blocks, owner, strict=True) if one == rank]


def digest(parts: Sequence[Shard], *facts: str) -> str:
    """Equal for exports that write the same bytes."""
    description = [[part.file, [[t.name, t.shape, str(t.dtype)] for t in part.tensors]]
                   for part in parts]  # fmt: skip
    return hashlib.sha256(json.dumps([description, facts]).encode()).hexdigest()
