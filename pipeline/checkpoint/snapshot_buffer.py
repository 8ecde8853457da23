"""Memory for copies of a rank's training state, which its writer maps too."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import torch

from pipeline.errors import CheckpointError
from pipeline.utils.files import anonymous_file
from pipeline.utils.page_lock import PageLock

TAKEN_AT_ONCE = 64 << 20
"""Bytes: some hundredths of a second."""
_BUFFERS: weakref.WeakSet[SnapshotBuffer] = weakref.WeakSet()


def memory_to_take() -> int:
    """Bytes that buffers of this process have not taken yet, and will."""
    return sum(buffer.to_take for buffer in _BUFFERS)


class SnapshotBuffer:
    """`size` bytes that a child process can map too (`descriptor`)."""

    def __init__(self, size: int) -> None:
        self.descriptor = anonymous_file("snapshot")
        os.truncate(self.descriptor, max(size, 1))
        self._map = mmap.mmap(self.descriptor, max(size, 1))
        self.memory = memoryview(self._map)[:size]
        self.to_take = size
        """Bytes that are not taken yet."""
        self._lock: PageLock | None = None
        self._closing = False
        _BUFFERS.add(self)

    def take(self, device: torch.device) -> None:
        """Take the memory from the system, so that no page fault stops the training loop, and lock
        the pages for copies from a GPU. Seconds for tens of GB, in which other threads go on.
        Raises CheckpointError for memory that the system does not give."""
        for start in range(0, len(self.memory), TAKEN_AT_ONCE):
            if self._closing:
                return
            with self.memory[start : start + TAKEN_AT_ONCE] as part:
                try:
                    os.posix_fallocate(self.descriptor, start, len(part))
                except OSError as error:
                    raise CheckpointError(
                        f"memory for copies of the training state cannot be taken: {error.strerror}"
                    ) from None
                # Pages that are there are still to be mapped, which takes a fault for each.
                ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(part)), 0, len(part))
            self.to_take -= min(TAKEN_AT_ONCE, self.to_take)
        if device.type == "cuda":
            with torch.cuda.device(device):  # each thread has a current one
                self._lock = PageLock(self.memory)

    def end_taking(self) -> None:
        """Have `take`, which another thread may be in, return soon."""
        self._closing = True

    def close(self) -> None:
        """Release the memory, once no view of it is left."""
        self.to_take = 0
        if self._lock is not None:
            self._lock.close()
        self.memory.release()
        self._map.close()
        os.close(self.descriptor)
