"""Memory for copies of a rank's training state, which its writer maps too."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from pipeline.utils.files import anonymous_file
from pipeline.utils.page_lock import PageLock

TAKEN_AT_ONCE = 64 << 20
"""Bytes: some hundredths of a second."""


class SnapshotBuffer:
    """`size` bytes that a child process can map too (`descriptor`)."""

    def __init__(self, size: int) -> None:
        self.descriptor = anonymous_file("snapshot")
        os.truncate(self.descriptor, max(size, 1))
        self._map = mmap.mmap(self.descriptor, max(size, 1))
        self.memory = memoryview(self._map)[:size]
        self._lock: PageLock | None = None
        self._closing = False

    def take(self, device: torch.device) -> None:
        """Take the memory from the system, so that no page fault stops the training loop, and lock
        the pages for copies from a GPU. Seconds for tens of GB, in which other threads go on."""
        for start in range(0, len(self.memory), TAKEN_AT_ONCE):
            if self._closing:
                return
            part = self.memory[start : start + TAKEN_AT_ONCE]
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(part)), 0, len(part))
        if device.type == "cuda":
            with torch.cuda.device(device):  # each thread has a current one
                self._lock = PageLock(self.memory)

    def end_taking(self) -> None:
        """Have `take`, which another thread may be in, return soon."""
        self._closing = True

    def close(self) -> None:
        """Release the memory, once no view of it is left."""
        if self._lock is not None:
            self._lock.close()
        self.memory.release()
        self._map.close()
        os.close(self.descriptor)
