"""Which tensor goes to which file, known before any weight is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.state.dtypes import CODES
from pipeline.state.safetensors_file import Entry, header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A tensor as it is to be in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One weight file with its tensors, in order."""

    file: str
    specs: Sequence[Spec]

    @property
    def size(self) -> int:
        """Bytes of tensors, without the header."""
        return sum(spec.size for spec in self.specs)

    def header(self) -> bytes:
        """What precedes the tensors in the file."""
        entries = [Entry(s.name, CODES[s.dtype], s.shape, s.size) for s in self.specs]
        return header(entries, metadata={"format": "pt"})


def shards(specs: Sequence[Spec], max_size: int) -> list[Shard]:
    """Cut `specs` into files of at most `max_size` bytes, in order; a larger tensor is alone."""
    groups: list[list[Spec]] = [[]]
    filled = 0
    for spec in specs:
        if groups[-1] and filled + spec.size > max_size:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += spec.size
    if len(groups) == 1:
        return [Shard(file=SINGLE, specs=groups[0])]
    count = len(groups)
    return [
        Shard(file=f"model-{number:05}-of-{count:05}.safetensors", specs=group)
        for number, group in enumerate(groups, start=1)
    ]


def index(parts: Sequence[Shard]) -> Mapping[str, Any]:
    """Content of the index file of a model in several files."""
    return {
        "metadata": {"total_size": sum(part.size for part in parts)},
        "weight_map": {spec.name: part.file for part in parts for spec in part.specs},
    }
