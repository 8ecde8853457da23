"""Have what a tool is going to read in the page cache, or out of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

PIECE = 8 << 20

Needed = Iterable[tuple[str, int, int]]
"""File, and bytes [begin, end) of it."""


def read(needed: Needed) -> float:
    """Seconds to read it all once and do nothing with it."""
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
    """Drop the files' pages, which must be on disk already."""
    for file in {file for file, _, _ in needed}:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
