"""Bytes of data files: safetensors headers and checksums of blocks. Imports no torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from xxhash import xxh3_64_intdigest

BLOCK: Final = 16384
"""Bytes of a block. Blocks count from the start of their piece; the last may be short."""
CHUNK: Final = 256 * BLOCK
"""Bytes that are read, written or verified at a time."""
SUM_BYTES = 8
"""Bytes of a block's checksum."""
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
    """A tensor of a file: bytes [begin, end) after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def table(head: bytes) -> dict[str, Placed]:
    """The tensors of a file by name, given what `header` returned. Raises ValueError."""
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
    for name, dtype, shape, size in entries:
        offsets = [start, start + size]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        start += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % align)
    return struct.pack("<Q", len(text)) + text


def block_sums(data: memoryview) -> list[int]:
    """The checksum (XXH3, 64 bits) of each block of `data`, which starts at a block's start."""
    return [xxh3_64_intdigest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]


def pack_sums(values: Sequence[int]) -> bytes:
    """Checksums as they are stored: 8 bytes little-endian each. Tensors are read and written in the
    machine's byte order, which is that too wherever torch runs on GPUs."""
    return struct.pack(f"<{len(values)}Q", *values)
