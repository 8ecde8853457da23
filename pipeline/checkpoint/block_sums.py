"""Checksums of the blocks of a checkpoint's data. Imports no torch."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from xxhash import xxh3_64_intdigest

BLOCK: Final = 16384
"""Bytes of a block. Blocks count from the start of their piece; the last may be short."""

CHUNK: Final = 256 * BLOCK
"""Bytes that are read, written or verified at a time."""

SUM_BYTES = 8


def count(size: int) -> int:
    """Blocks of a piece of `size` bytes."""
    return -(-size // BLOCK)


def sums(data: memoryview) -> list[int]:
    """The checksum (XXH3, 64 bits) of each block of `data`, which starts at a block's start."""
    return [xxh3_64_intdigest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]


def first_wrong(data: memoryview, expected: Sequence[int]) -> int | None:
    """Index of the first block of `data` whose checksum differs; None if all agree."""
    pairs = enumerate(zip(sums(data), expected, strict=True))
    return next((at for at, (found, wanted) in pairs if found != wanted), None)


def pack(values: Sequence[int]) -> bytes:
    """Checksums as they are stored: 8 bytes little-endian each."""
    return struct.pack(f"<{len(values)}Q", *values)


def unpack(data: bytes) -> memoryview:
    """Checksums that `pack` stored: a view, as there can be millions. Tensors are read and written
    in the machine's order of bytes too, which is little-endian wherever torch runs on GPUs."""
    return memoryview(data).cast("Q")
