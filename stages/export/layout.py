"""Which tensor goes to which file, known before any weight is read."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names that the safetensors format gives to dtypes."""


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
        """What precedes the tensors: the length of the JSON as 8 bytes little-endian, and the JSON
        padded with spaces to a multiple of 8 (https://github.com/huggingface/safetensors)."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for spec in self.specs:
            entries[spec.name] = {
                "dtype": DTYPE_CODES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [start, start + spec.size],
            }
            start += spec.size
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


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
