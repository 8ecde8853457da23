"""Sample order of a stream: a pure function of the seed and of each shard's number of blocks."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeline.contracts.sample_order import ENDLESS, SampleOrder
from pipeline.errors import StageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

WINDOW_BITS, SHARD_BITS, BLOCK_BITS = 23, 20, 20
"""Bits of an index: a window's number, a shard's number, and a block's number in the shard."""


class Place(NamedTuple):
    """Shard and number of a block, and the window that it is read for."""

    window: int
    shard: int
    block: int


class StreamOrder:
    """Windows of shards, one behind the other, epoch after epoch.

    Epoch e visits the shards in the order of epoch e of SampleOrder, `window` at a time; the last
    window of an epoch may have fewer. Within window number g, counted over all epochs, blocks come
    in the order of epoch g of a SampleOrder. Without `shuffle` both are in their stored order.
    """

    size = ENDLESS

    def __init__(
        self, seed: int, *, shuffle: bool, shards: int, window: int, count: Callable[[int], int]
    ) -> None:
        """`count` returns a shard's number of blocks, which may need reading it. Raises StageError
        if there are more shards than an index can number."""
        _require(shards, SHARD_BITS, "shards")
        self._seed = seed
        self._shuffle = shuffle
        self._shards = SampleOrder(seed, shards, shuffle=shuffle)
        self._window = window
        self._windows = -(-shards // window)
        self._count = count
        self._kept: tuple[int, list[int]] = (-1, [])
        self._ends: list[int] = []
        """End position of each window so far."""

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """Return the indices of positions start ... start + count - 1; shape (count,)."""
        pieces = [np.empty(0, dtype=np.int64)]
        while count > 0:
            number = self._at(start)
            taken = min(count, self._ends[number] - start)
            pieces.append(self._blocks(number, start - self._start(number), taken))
            start, count = start + taken, count - taken
        return np.concatenate(pieces)

    def members(self, number: int) -> list[int]:
        """Return the shards of a window."""
        epoch, place = divmod(number, self._windows)
        return self._epoch(epoch)[place * self._window : (place + 1) * self._window]

    def _epoch(self, epoch: int) -> list[int]:
        """Return all shards in the order of an epoch; the latest epoch is kept."""
        known, shards = self._kept  # one read: other threads write it
        if known != epoch:
            count = self._shards.size
            shards = self._shards.indices(epoch * count, count).tolist()
            self._kept = epoch, shards
        return shards

    def _at(self, position: int) -> int:
        """Return the window of a position."""
        while not self._ends or self._ends[-1] <= position:
            number = len(self._ends)
            self._ends.append(self._start(number) + sum(map(self._count, self.members(number))))
            if number + 1 == self._windows and not self._ends[-1]:
                raise StageError("no shard has two tokens of text")
        return bisect_right(self._ends, position)

    def _start(self, number: int) -> int:
        return self._ends[number - 1] if number else 0

    def _blocks(self, number: int, offset: int, count: int) -> NDArray[np.int64]:
        _require(number + 1, WINDOW_BITS, "windows")
        members = np.array(self.members(number), dtype=np.int64)
        sizes = map(self._count, members.tolist())
        starts = np.array(list(itertools.accumulate(sizes, initial=0)), dtype=np.int64)
        size = int(starts[-1])
        _require(int(np.diff(starts).max()), BLOCK_BITS, "blocks in a shard")
        order = SampleOrder(self._seed, size, shuffle=self._shuffle)
        places = order.indices(number * size + offset, count)
        which = np.searchsorted(starts, places, side="right") - 1
        shards = (number << SHARD_BITS) | members[which]
        return (shards << BLOCK_BITS) | (places - starts[which])


def _require(count: int, bits: int, what: str) -> None:
    if count > 1 << bits:
        raise StageError(f"{count} {what} are more than the {1 << bits} that a stream can have")


def located(index: int) -> Place:
    """Return the place that an index encodes."""
    rest, block = divmod(index, 1 << BLOCK_BITS)
    return Place(*divmod(rest, 1 << SHARD_BITS), block)


def first_blocks(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of the first block of the same shard and window for each index."""
    return indices >> BLOCK_BITS << BLOCK_BITS
