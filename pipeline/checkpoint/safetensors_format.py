"""The safetensors format. Imports no torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element, by the format's name of the dtype."""


class Entry(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    """Bytes."""


class Placed(NamedTuple):
    """A tensor of a file: bytes [begin, end) of what follows the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def table(head: bytes) -> dict[str, Placed]:
    """The tensors of a file by name, given what `header` returned. Raises ValueError for anything
    else."""
    try:
        entries = json.loads(head[8:])
        entries.pop("__metadata__", None)
        return {
            name: Placed(entry["dtype"], tuple(entry["shape"]), *map(int, entry["data_offsets"]))
            for name, entry in entries.items()
        }
    except (TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError("no safetensors header") from error


def header(
    entries: Iterable[Entry], *, metadata: Mapping[str, str] | None = None, align: int = 8
) -> bytes:
    """Bytes that precede the tensors, which follow without gaps in the given order: the length of
    the JSON as 8 bytes little-endian, and the JSON padded with spaces so that data begins at a
    multiple of `align` (https://github.com/huggingface/safetensors)."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for entry in entries:
        table[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [start, start + entry.size],
        }
        start += entry.size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % align)
    return struct.pack("<Q", len(text)) + text
