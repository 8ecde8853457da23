"""Tiles: the shapes that parts of a tensor have, as flat ranges or as columns of rows; and their
bytes within files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Box(NamedTuple):
    """Rows [top, bottom) and columns [left, right) of a tensor. The first element is number `at` of
    a tile, in which its rows follow each other `pitch` elements apart."""

    top: int
    bottom: int
    left: int
    right: int
    at: int
    pitch: int


class Tile(NamedTuple):
    """Elements [start, stop) of a flattened tensor, and `count` - 1 runs more of as many elements,
    each `stride` behind the one before. A flat range has the stride 0 and the count 1; columns keep
    the length of the tensor's rows as their stride, also in a single row."""

    start: int
    stop: int
    stride: int = 0
    count: int = 1  # type: ignore[assignment]  # hides tuple.count

    @property
    def run(self) -> int:
        """Elements that follow each other."""
        return self.stop - self.start

    @property
    def numel(self) -> int:
        """Elements."""
        return (self.stop - self.start) * self.count

    @property
    def end(self) -> int:
        """Element of the tensor behind the last one."""
        return self.stop + (self.count - 1) * self.stride

    def element(self, at: int) -> int:
        """Number within the tensor of the tile's element number `at`."""
        row, column = divmod(at, self.run)
        return self.start + row * self.stride + column

    def position(self, element: int) -> int | None:
        """Number within the tile of the tensor's element; None if the tile does not have it."""
        row, column = divmod(element - self.start, self.stride or self.run)
        if not 0 <= row < self.count or column >= self.run:
            return None
        return row * self.run + column

    def boxes(self, width: int) -> Iterator[Box]:
        """The boxes that make up the tile, in order, where the tensor's rows have `width` elements:
        up to three for a flat range. The stride must be `width` or 0."""
        if not self.stride:
            yield from boxes(self.start, self.stop, width)
            return
        assert self.stride == width, f"rows of {self.stride} and of {width} elements"
        top, left = divmod(self.start, width)
        yield Box(top, top + self.count, left, left + self.run, 0, self.run)


class Overlap(NamedTuple):
    """Elements that two tiles share: `rows` runs of `run` elements, in each tile from an element
    (`here`, `there`) on and so many elements (`pitch`, `step`) apart."""

    rows: int
    run: int
    here: int
    pitch: int
    there: int
    step: int


def boxes(low: int, high: int, width: int) -> Iterator[Box]:
    """The boxes that make up elements [low, high): the end of a row, whole rows, the start of a
    row."""
    (top, left), (bottom, right), at = divmod(low, width), divmod(high, width), 0
    if low >= high:
        return
    if left:
        end = right if top == bottom else width
        yield Box(top, top + 1, left, end, 0, width)
        at, top = end - left, top + 1
    if top < bottom:
        yield Box(top, bottom, 0, width, at, width)
        at += (bottom - top) * width
    if right and top <= bottom:
        yield Box(bottom, bottom + 1, 0, right, at, width)


def overlaps(here: Tile, there: Tile, width: int) -> Iterator[Overlap]:
    """Yield the rectangles that two tiles of a tensor with rows of `width` elements share."""
    for one in here.boxes(width):
        for other in there.boxes(width):
            top, left = max(one.top, other.top), max(one.left, other.left)
            rows = min(one.bottom, other.bottom) - top
            run = min(one.right, other.right) - left
            if rows > 0 and run > 0:
                yield Overlap(
                    rows, run, _number(one, top, left), one.pitch, _number(other, top, left),
                    other.pitch,
                )  # fmt: skip


def _number(box: Box, top: int, left: int) -> int:
    return box.at + (top - box.top) * box.pitch + left - box.left


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
