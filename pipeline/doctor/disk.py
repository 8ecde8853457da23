"""Sequential writing and reading of one file, as one process does it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.utils.files import page_aligned, read_at, write_at

PIECE = 8 << 20
BETWEEN_SYNCS = 64 << 20
"""Bytes that may wait to be written. Few, so that a slow disk is noticed in time."""


def measure(settings: Mapping[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Write up to `size` bytes in `folder`, for some `budget` seconds, each part forced to disk;
    then read them for as long. Tells bytes per second.

    What the system keeps of the file in memory is dropped before it is read (POSIX_FADV_DONTNEED).
    Memory of the disk itself, of a file server or of a virtual machine's host is not.
    """
    data = memoryview(os.urandom(PIECE))  # some file systems and disks compress
    # without a name: nothing is left of it, however this process ends
    with tempfile.TemporaryFile(dir=settings["folder"], buffering=0) as file:
        descriptor = file.fileno()
        written, seconds = _write(descriptor, data, settings["size"], settings["budget"])
        tell({"disk_write_bytes_per_s": written / seconds})
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        read, seconds = _read(descriptor, written, settings["budget"])
        tell({"disk_read_bytes_per_s": read / seconds})


def _write(descriptor: int, data: memoryview, size: int, budget: float) -> tuple[int, float]:
    start, done = time.perf_counter(), 0
    while done < size and time.perf_counter() - start < budget:
        until = min(done + BETWEEN_SYNCS, size)
        while done < until:
            write_at(descriptor, done, data)
            done += len(data)
        os.fsync(descriptor)
    return done, time.perf_counter() - start


def _read(descriptor: int, size: int, budget: float) -> tuple[int, float]:
    into = page_aligned(PIECE)
    into[:] = bytes(PIECE)  # pages that are there
    start, done = time.perf_counter(), 0
    while done < size and time.perf_counter() - start < budget:
        done += read_at(descriptor, done, into)
    return done, time.perf_counter() - start
