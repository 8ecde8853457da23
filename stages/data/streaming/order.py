"""The order of a stream: a pure function of the seed, and of how many blocks each shard has."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeline.contracts.sample_order import ENDLESS, SampleOrder
from pipeline.errors import StageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

WINDOW_BITS, SHARD_BITS, BLOCK_BITS = 23, 20, 20
"""An index is made of a window's number, a shard's number, and a block's number in the shard."""


class Place(NamedTuple):
    """Where a block is, and in which window it is wanted."""

    window: int
    shard: int
    block: int


class StreamOrder:
    """Windows of shards, one behind the other, epoch after epoch.

    Epoch e visits the shards in the order that SampleOrder gives them in its epoch e, `window` at a
    time, the last window of an epoch perhaps fewer. Within window number g, counted over all
    epochs, blocks come in the order that SampleOrder gives as many samples in its epoch g. Without
    `shuffle` both are as they lie.
    """

    size = ENDLESS

    def __init__(
        self,
        seed: int,
        *,
        shuffle: bool,
        shards: int,
        window: int,
        count: Callable[[int], int],
    ) -> None:
        """`count` tells how many blocks a shard has, which may take reading it. Raises StageError
        when there are more shards than an index can tell apart."""
        _require(shards, SHARD_BITS, "shards")
        self._seed = seed
        self._shuffle = shuffle
        self._shards = SampleOrder(seed, shards, shuffle=shuffle)
        self._window = window
        self._windows = -(-shards // window)
        self._count = count
        self._kept: tuple[int, list[int]] = (-1, [])
        self._ends: list[int] = []
        """Position behind each window so far."""

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """The blocks at positions start ... start + count - 1; shape (count,)."""
        pieces = [np.empty(0, dtype=np.int64)]
        while count > 0:
            number = self._at(start)
            taken = min(count, self._ends[number] - start)
            pieces.append(self._blocks(number, start - self._start(number), taken))
            start, count = start + taken, count - taken
        return np.concatenate(pieces)

    def members(self, number: int) -> list[int]:
        """The shards of a window."""
        epoch, place = divmod(number, self._windows)
        return self._epoch(epoch)[place * self._window : (place + 1) * self._window]

    def _epoch(self, epoch: int) -> list[int]:
        """All shards in the order of an epoch; kept for the latest one that was asked for."""
        known, shards = self._kept  # in one go: threads ask as well
        if known != epoch:
            count = self._shards.size
            shards = self._shards.indices(epoch * count, count).tolist()
            self._kept = epoch, shards
        return shards

    def _at(self, position: int) -> int:
        """The window that a position is in."""
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
        starts = np.array(_sums(map(self._count, members.tolist())), dtype=np.int64)
        size = int(starts[-1])
        _require(int(np.diff(starts).max()), BLOCK_BITS, "blocks in a shard")
        order = SampleOrder(self._seed, size, shuffle=self._shuffle)
        places = order.indices(number * size + offset, count)
        which = np.searchsorted(starts, places, side="right") - 1
        shards = (number << SHARD_BITS) | members[which]
        return (shards << BLOCK_BITS) | (places - starts[which])


def _sums(counts: Iterable[int]) -> Sequence[int]:
    return list(itertools.accumulate(counts, initial=0))


def _require(count: int, bits: int, what: str) -> None:
    if count > 1 << bits:
        raise StageError(f"{count} {what} are more than the {1 << bits} that a stream can have")


def located(index: int) -> Place:
    """What an index says."""
    rest, block = divmod(index, 1 << BLOCK_BITS)
    return Place(*divmod(rest, 1 << SHARD_BITS), block)


def first_blocks(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """The index of the first block of each one's shard in its window."""
    return indices >> BLOCK_BITS << BLOCK_BITS
