"""A tensor that is stored as boxes (chunks of any of its dimensions), read as a flat one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.checkpoint.layout import as_bytes
from pipeline.checkpoint.safetensors_format import CHUNK
from pipeline.errors import CheckpointError
from stages.formats.mapped import Shape


class Box(NamedTuple):
    """Elements [offset, offset + size) of every dimension."""

    offsets: Shape
    sizes: Shape


class Boxes:
    """`mapped(number)` is a box's memory: its sizes, then the bytes of an element.

    Reading assembles bands of whole rows, of at most CHUNK bytes unless a single row is more.
    """

    def __init__(
        self, where: str, shape: Shape, itemsize: int, boxes: Sequence[Box],
        mapped: Callable[[int], Tensor],
    ) -> None:  # fmt: skip
        self._where = where
        # a scalar is read as a vector of one element
        self._shape = shape or (1,)
        self._itemsize = itemsize
        self._boxes = [Box(box.offsets or (0,), box.sizes or (1,)) for box in boxes]
        self._mapped = mapped
        self._held: dict[int, Tensor] = {}
        self._require_cover()

    def read(self, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        """Bytes of elements [start, stop) of the flattened tensor, with the first one's number.
        Raises CheckpointError."""
        if start >= stop:
            return
        row = math.prod(self._shape[1:])
        rows = max(CHUNK // (row * self._itemsize), 1)
        for first in range(start // row, -(-stop // row), rows):
            last = min(first + rows, -(-stop // row))
            band = as_bytes(self._band(first, last).view(-1))
            low, high = max(start, first * row), min(stop, last * row)
            begin = (low - first * row) * self._itemsize
            yield low, band[begin : begin + (high - low) * self._itemsize]

    def _band(self, first: int, last: int) -> Tensor:
        """Rows [first, last), in memory without gaps; copied only out of several boxes."""
        # Each has to be as large as it is said to be before a band is made for them.
        parts = list(self._parts(first, last))
        if len(parts) == 1:
            ((box, low, high, memory),) = parts
            return memory[low - box.offsets[0] : high - box.offsets[0]].contiguous()
        shape = (last - first, *self._shape[1:])
        band = torch.empty((*shape, self._itemsize), dtype=torch.uint8)
        for box, low, high, memory in parts:
            others = zip(box.offsets[1:], box.sizes[1:], strict=True)
            place = (slice(low - first, high - first), *(slice(o, o + s) for o, s in others))
            band[place] = memory[low - box.offsets[0] : high - box.offsets[0]]
        return band

    def _parts(self, first: int, last: int) -> Iterator[tuple[Box, int, int, Tensor]]:
        """The boxes that reach into rows [first, last): which rows of it, and their memory."""
        for number, box in enumerate(self._boxes):
            low, high = max(first, box.offsets[0]), min(last, box.offsets[0] + box.sizes[0])
            if low < high:
                yield box, low, high, self._memory(number)
            else:
                self._held.pop(number, None)

    def _memory(self, number: int) -> Tensor:
        if number not in self._held:
            sizes = (*self._boxes[number].sizes, self._itemsize)
            found = self._mapped(number)
            if math.prod(found.shape) != math.prod(sizes):
                raise CheckpointError(
                    f"{self._where}: a chunk has {math.prod(found.shape)} bytes instead of "
                    f"{math.prod(sizes)}"
                )
            self._held[number] = found.reshape(sizes) if found.dim() != len(sizes) else found
        return self._held[number]

    def _require_cover(self) -> None:
        """Boxes that lie inside, do not overlap, and have as many elements as the whole, are it."""
        for offsets, sizes in self._boxes:
            if len(offsets) != len(self._shape) or any(
                offset < 0 or size < 1 or offset + size > whole
                for offset, size, whole in zip(offsets, sizes, self._shape, strict=True)
            ):
                raise CheckpointError(f"{self._where}: a chunk lies outside of the tensor")
        total = sum(math.prod(box.sizes) for box in self._boxes)
        if total != math.prod(self._shape) or _overlap(self._boxes):
            raise CheckpointError(f"{self._where}: chunks overlap or leave a gap")


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether any two have an element in common."""
    open_: list[Box] = []
    for box in sorted(boxes):
        open_ = [other for other in open_ if other.offsets[0] + other.sizes[0] > box.offsets[0]]
        if any(_meet(box, other) for other in open_):
            return True
        open_.append(box)
    return False


def _meet(one: Box, other: Box) -> bool:
    return all(
        a < b + length and b < a + size for a, size, b, length in zip(*one, *other, strict=True)
    )
