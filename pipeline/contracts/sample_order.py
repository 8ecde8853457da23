"""The order in which a run visits its samples: a pure function of seed, epoch and position.

The order is part of what a checkpoint means (a resumed run continues at a position), so it is
defined by integer arithmetic only, whatever numpy, torch or the number of processes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WORD = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = 8
_LEAST_HALF_BITS = 4
# Narrower networks reach too few permutations: with 2-bit halves first places are visibly skewed.

ENDLESS = sys.maxsize
"""Size of an order whose epochs have a length that is not known."""


class Order(Protocol):
    """The endless sequence of sample indices that a run trains on."""

    @property
    def size(self) -> int:
        """Positions in an epoch, or ENDLESS."""

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """The samples at positions start ... start + count - 1; shape (count,)."""


@dataclass(frozen=True)
class SampleOrder:
    """An order of samples that are all known; shuffled again in every epoch.

    Position p lies in epoch p // size; within an epoch every index of range(size) occurs once. An
    epoch's permutation is a balanced Feistel network (Luby and Rackoff 1988) over the next power of
    four (256 at least), restricted to range(size) by cycle walking (Black and Rogaway 2002, section
    3), with splitmix64 (Steele et al. 2014) as round function. Memory and time per position do not
    grow with `size`: at most four passes of eight rounds on average (256 / size when size < 64)."""

    seed: int
    size: int
    shuffle: bool = True
    """False visits the samples as they lie, epoch after epoch."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"an order needs at least one sample, not {self.size}")

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        if start < 0 or count < 0:
            raise ValueError(f"positions count from 0: start={start}, count={count}")
        positions = np.arange(start, start + count, dtype=np.int64)
        epochs, offsets = np.divmod(positions, self.size)
        if not self.shuffle:
            return offsets
        # Arrays, because numpy warns when a scalar wraps around.
        keys = _mix(_mix(np.array([self.seed & _WORD], np.uint64)) + epochs.astype(np.uint64))
        half_bits = max(_LEAST_HALF_BITS, ((self.size - 1).bit_length() + 1) // 2)
        values = _feistel(offsets.astype(np.uint64), keys, half_bits)
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = _feistel(values[outside], keys[outside], half_bits)
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One output of splitmix64 for each state in `values`."""
    values = values + np.uint64(_GAMMA)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _feistel(
    values: NDArray[np.uint64], keys: NDArray[np.uint64], half_bits: int
) -> NDArray[np.uint64]:
    """Permute range(4 ** half_bits), elementwise, by the permutation that each key names."""
    bits = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for number in range(_ROUNDS):
        round_keys = _mix(keys + np.array([number * _GAMMA & _WORD], np.uint64))
        left, right = right, left ^ (_mix(right ^ round_keys) & mask)
    return (left << bits) | right
