"""Put the files that a tool will read into the page cache, or drop them from it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

PIECE = 8 << 20

Needed = Iterable[tuple[str, int, int]]
"""File, and its bytes [begin, end)."""


def read(needed: Needed) -> float:
    """Return the seconds to read everything once and do nothing with it."""
    buffer = memoryview(bytearray(PIECE))
    began = time.perf_counter()
    for file, begin, end in needed:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            while begin < end:
                begin += os.preadv(descriptor, [buffer[: min(PIECE, end - begin)]], begin)
        finally:
            os.close(descriptor)
    return time.perf_counter() - began


def evict(needed: Needed) -> None:
    """Drop the files' pages, which must already be on disk."""
    for file in {file for file, _, _ in needed}:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
