"""Which rank has which part of every tensor, said by rule: it does not grow with the ranks.

numpy is imported where divisions are computed: manifests are read, and plans made, without it.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

from annotated_types import Ge

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Span(NamedTuple):
    """Elements [start, stop) of the logical tensor `key`."""

    key: str
    start: int
    stop: int


class CoverageError(ValueError):
    """Ranges overlap, leave a gap, or reach beyond the tensor."""

    tensor = 0
    """Its number, where there are several."""


def require_cover(ranges: Iterable[tuple[int, int]], total: int) -> None:
    """Raise CoverageError unless the ranges are disjoint and together exactly [0, total)."""
    end = 0
    for start, stop in sorted(ranges):
        if start > end:
            raise CoverageError(f"elements {end} to {start} are missing")
        if start < end:
            raise CoverageError(f"elements {start} to {min(end, stop)} are there twice")
        end = stop
    if end != total:
        raise CoverageError(f"ends at element {end} of {total}")


Count = Annotated[int, Ge(0)]
LARGEST = 1 << 44
"""Elements of a tensor; with the tensor's number that makes a 64-bit key."""
MOST_TENSORS = (1 << 63) // LARGEST - 2
"""So that the key behind the last tensor's is one too."""


class Run(NamedTuple):
    """Elements [start, stop) of a tensor: parts of `length`, the last perhaps shorter, on ranks
    `rank`, `rank + step`, ... Each is cut again into `cuts` equal parts, on ranks that are `apart`.
    """

    start: Count
    stop: Count
    length: Annotated[int, Ge(1)]
    rank: Count
    step: Count = 0
    cuts: Annotated[int, Ge(1)] = 1
    apart: Count = 0

    @property
    def parts(self) -> int:
        """How many, before each is cut again."""
        return -(-(self.stop - self.start) // self.length)

    @property
    def cut(self) -> int:
        """Elements of a part of a part, but for the last ones."""
        return -(-self.length // self.cuts)

    @property
    def is_clear(self) -> bool:
        """Whether it has at most one piece for a rank, and a rank's number tells which."""
        steps = [(self.step, self.parts), (self.apart, self.cuts)]
        (inner, few), (outer, _) = sorted(steps)
        if self.length > self.stop - self.start:
            return False
        said = all(many > 0 and (step > 0) == (many > 1) for step, many in steps)
        return said and (outer > inner * (few - 1) or outer == 0)

    def pieces(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Rank, start and stop of the pieces that have elements of [low, high), in order."""
        for part in range(max(low - self.start, 0) // self.length, self.parts):
            begin = self.start + part * self.length
            end = min(begin + self.length, self.stop)
            for cut in range(max(low - begin, 0) // self.cut, self.cuts):
                start = begin + cut * self.cut
                if start >= min(end, high):
                    break
                rank = self.rank + part * self.step + cut * self.apart
                yield rank, start, min(start + self.cut, end)
            if end >= high:
                return


class Pieces(NamedTuple):
    """Ranges of tensors by their numbers, as columns of one length."""

    tensor: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]


class Division:
    """The runs of every tensor, in order."""

    def __init__(self, runs: Sequence[Sequence[Run]]) -> None:
        self.runs = runs

    @functools.cached_property
    def _columns(self) -> NDArray[np.int64]:
        """Shape (10, runs): numbers of tensors, and what is known of each of their runs."""
        import numpy as np

        every = [(number, run) for number, own in enumerate(self.runs) for run in own]
        columns = [[number, *run, run.parts, run.cut] for number, run in every]
        return np.array(columns, dtype=np.int64).reshape(-1, 10).T

    def require_sense(self, numels: Sequence[int], ranks: int) -> None:
        """Raise CoverageError, with the tensor's number, unless every tensor is there once, on
        ranks that there are."""
        for number, (own, numel) in enumerate(zip(self.runs, numels, strict=True)):
            try:
                require_cover([(run.start, run.stop) for run in own], numel)
                for run in own:
                    last = run.rank + (run.parts - 1) * run.step + (run.cuts - 1) * run.apart
                    if not run.is_clear or last >= ranks:
                        raise CoverageError("cut for ranks that there are not")
            except CoverageError as misfit:
                misfit.tensor = number
                raise

    def find(self, tensor: int, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Rank, start and stop of the pieces that have elements [low, high) of a tensor."""
        own = self.runs[tensor]
        place = bisect_right(own, low, key=lambda run: run.start) - 1
        for run in own[max(place, 0) :]:
            if run.start >= high:
                return
            if low < run.stop:
                yield from run.pieces(low, high)

    def of(self, rank: int) -> Pieces:
        """The pieces of a rank, by tensor and start."""
        import numpy as np

        tensor, start, stop, length, first, step, cuts, apart, parts, cut = self._columns
        swapped = apart > step
        outer, inner = np.maximum(step, apart), np.minimum(step, apart)
        rest = rank - first
        many = np.where(outer > 0, rest // np.maximum(outer, 1), 0)
        few = np.where(inner > 0, (rest - many * outer) // np.maximum(inner, 1), 0)
        part, place = np.where(swapped, few, many), np.where(swapped, many, few)
        there = (rest >= 0) & (many * outer + few * inner == rest) & (part < parts) & (place < cuts)
        begin = start + part * length
        low = begin + place * cut
        high = np.minimum(np.minimum(low + cut, begin + length), stop)
        there &= low < high
        return Pieces(tensor[there], low[there], high[there])
