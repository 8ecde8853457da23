"""Checksums of fixed-size blocks, so that any range of a piece can be verified alone."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Final

from xxhash import xxh3_64_intdigest

BLOCK: Final = 16384
"""Bytes of a block. Blocks count from the start of their piece; the last may be short."""

CHUNK: Final = 256 * BLOCK
"""Bytes that are read, written or verified at a time; all the memory that one of these needs."""

SUM_BYTES = 8


def count(size: int) -> int:
    """Blocks of a piece of `size` bytes."""
    return -(-size // BLOCK)


def sums(data: memoryview) -> list[int]:
    """The checksum (XXH3, 64 bits) of each block of `data`, which starts at a block's start."""
    return [xxh3_64_intdigest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]


def first_wrong(data: memoryview, expected: Sequence[int]) -> int | None:
    """Index of the first block of `data` whose checksum is another; None if all agree."""
    found = sums(data)
    if found == list(expected):
        return None
    return next(at for at, (one, other) in enumerate(zip(found, expected, strict=True))
                if one != other)  # fmt: skip


def pack(values: Sequence[int]) -> bytes:
    """Checksums as they are stored: 8 bytes little-endian each."""
    return struct.pack(f"<{len(values)}Q", *values)


def unpack(data: bytes) -> memoryview:
    """The reverse of `pack`; a view, as there can be millions."""
    return memoryview(array("Q", data) if sys.byteorder == "little" else _swapped(data))


def _swapped(data: bytes) -> array[int]:
    values = array("Q", data)
    values.byteswap()
    return values
