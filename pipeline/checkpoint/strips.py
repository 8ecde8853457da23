"""Elements on their way from a piece of a stored tensor to a tile of a live one."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.checkpoint.tiles import Overlap


class Strip(NamedTuple):
    """Elements of a tile: those `here` in `data`, which go `there` in the tile. `data` is valid
    until the next strip is taken."""

    overlap: Overlap
    data: memoryview

    def copy_into(self, memory: bytearray, size: int) -> None:
        """Copy into the memory of the tile's elements, of `size` bytes each."""
        rows, run, here, pitch, there, step = self.overlap
        if rows == 1:
            source = self.data[here * size : (here + run) * size]
            memory[there * size : (there + run) * size] = source
            return
        import numpy as np

        shape = rows, run * size
        stored = np.ndarray(shape, np.uint8, self.data, here * size, (pitch * size, 1))
        target = np.ndarray(shape, np.uint8, memory, there * size, (step * size, 1))
        target[:] = stored
