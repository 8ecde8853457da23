"""Several sample sets as one."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.artifacts import Sample, Samples
from stages.data.blocks import require_within

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Mixture(Samples):
    """Sets one behind the other, of which each is repeated to a given number of samples.

    Of a set of n samples that is given c >= n places, place k holds sample floor(k n / c): every
    sample is there floor(c / n) or ceil(c / n) times, those that are there once more spread evenly.
    """

    def __init__(self, parts: Sequence[Samples], counts: Sequence[int]) -> None:
        for part, count in zip(parts, counts, strict=True):
            if count < len(part):
                raise ValueError(f"{count} places for {len(part)} samples")
        self._parts = parts
        self._starts = list(itertools.accumulate(counts, initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Sample:
        part, inner = self._locate(index)
        return self._parts[part][inner]

    def targets(self, index: int) -> int:
        part, inner = self._locate(index)
        return self._parts[part].targets(inner)

    def total_targets(self, indices: NDArray[np.int64]) -> int:
        indices, total = require_within(indices, len(self)), 0
        for part, start, stop in zip(self._parts, self._starts, self._starts[1:], strict=False):
            places = indices[(start <= indices) & (indices < stop)] - start
            total += part.total_targets(places * len(part) // (stop - start))
        return total

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        part = bisect_right(self._starts, index) - 1
        place, count = index - self._starts[part], self._starts[part + 1] - self._starts[part]
        return part, place * len(self._parts[part]) // count


def shares(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Samples of each set in an epoch: proportional to the weights, rounded to the nearest, and as
    few as hold every sample of every set."""
    scale = max(size / weight for size, weight in zip(sizes, weights, strict=True))
    return [
        max(size, round(scale * weight)) for size, weight in zip(sizes, weights, strict=True)
    ]  # fmt: skip


def mixed(parts: Sequence[Samples], weights: Sequence[float]) -> Samples:
    """The sets mixed by weight."""
    if len(parts) == 1:
        return parts[0]
    return Mixture(parts, shares([len(part) for part in parts], weights))


def joined(parts: Sequence[Samples]) -> Samples | None:
    """The sets one behind the other; None if there are none."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    return Mixture(parts, [len(part) for part in parts])
