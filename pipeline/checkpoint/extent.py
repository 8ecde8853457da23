"""Bytes of pieces within files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pipeline.checkpoint.tiles import Overlap, Tile


class Extent(NamedTuple):
    """Bytes of a file, from byte `offset` on: all of a piece, or in runs of `run` bytes that begin
    `stride` apart."""

    offset: int
    run: int = 0
    stride: int = 0

    @classmethod
    def of(cls, tile: Tile, offset: int, itemsize: int, *, whole: bool) -> Extent:
        """The extent of a tile whose first element is at byte `offset`; it lies in runs where the
        file has the `whole` tensor."""
        if whole and tile.count > 1:
            return cls(offset, tile.run * itemsize, tile.stride * itemsize)
        return cls(offset)

    def segments(self, begin: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Where bytes [begin, begin + size) of the piece lie: for each run of them its first byte
        in the file, and [low, high) among those bytes."""
        if not self.run:
            yield self.offset + begin, 0, size
            return
        low = 0
        while low < size:
            row, within = divmod(begin + low, self.run)
            high = min(low + self.run - within, size)
            yield self.offset + row * self.stride + within, low, high
            low = high


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
