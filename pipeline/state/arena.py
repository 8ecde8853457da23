"""Memory that holds a snapshot while another process writes it to disk."""

from __future__ import annotations

import mmap
import os

from pipeline.files import anonymous_file


class Arena:
    """`size` bytes that a child process can map too (`descriptor`), all of them backed by memory
    from the start: no page fault ever stops the training loop."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor = anonymous_file("snapshot")
        os.truncate(self.descriptor, max(size, 1))
        self._map = mmap.mmap(self.descriptor, max(size, 1))
        self.memory = memoryview(self._map)[:size]
        zeros = bytes(1 << 20)
        for start in range(0, size, len(zeros)):
            part = self.memory[start : start + len(zeros)]
            part[:] = zeros[: len(part)]

    def close(self) -> None:
        """Give the memory back, once no view of it is left."""
        self.memory.release()
        self._map.close()
        os.close(self.descriptor)
