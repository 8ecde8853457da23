"""The division of tensors among ranks: runs, which state it by rule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

from annotated_types import Ge

from pipeline.checkpoint.tiles import Box, Tile

Count = Annotated[int, Ge(0)]
Positive = Annotated[int, Ge(1)]


class CoverageError(ValueError):
    """Parts overlap, leave a gap, or reach beyond the tensor."""


class KeyedTile(NamedTuple):
    """A tile of the logical tensor `key`."""

    key: str
    start: int
    stop: int
    stride: int = 0
    count: int = 1  # type: ignore[assignment]  # hides tuple.count

    @property
    def tile(self) -> Tile:
        """The tile without the key."""
        return Tile(*self[1:])


class Run(NamedTuple):
    """Elements [start, stop) of a tensor: parts of `length`, the last perhaps shorter, on ranks
    `rank`, `rank + step`, ... Each is cut again into `cuts` equal parts, on ranks that are `apart`.

    With a `width` the tensor is seen as rows of so many elements: parts and cuts are whole rows.
    Each is divided by columns once more, into `bands` of equal width (the last perhaps narrower) on
    ranks that are `across`. If `start` and `stop` lie within rows, they bound the columns.
    """

    start: Count
    stop: Count
    length: Positive
    rank: Count
    step: Count = 0
    cuts: Positive = 1
    apart: Count = 0
    width: Count = 0
    bands: Positive = 1
    across: Count = 0

    @property
    def unit(self) -> int:
        """Elements that stay together in parts and cuts: a row, or one."""
        return self.width or 1

    @property
    def rows(self) -> int:
        """Number of units."""
        return (self.stop - 1) // self.unit - self.start // self.unit + 1

    @property
    def columns(self) -> tuple[int, int]:
        """The first column, and the one behind the last."""
        return self.start % self.unit, (self.stop - 1) % self.unit + 1

    @property
    def has_whole_rows(self) -> bool:
        """Whether all columns are in it, so that it is a range of elements."""
        return self.columns == (0, self.unit)

    @property
    def stride(self) -> int:
        """Stride of its pieces; 0 if they are flat."""
        return 0 if self.bands == 1 and self.has_whole_rows else self.width

    @property
    def parts(self) -> int:
        """Number of parts, before each is cut again."""
        return -(-self.rows // self._part)

    @property
    def is_unambiguous(self) -> bool:
        """Whether it has at most one piece for a rank, which the rank's number determines."""
        left, right = self.columns
        if self.start >= self.stop or right - left < self.bands or self.length % self.unit:
            return False
        if self.length > self.rows * self.unit:
            return False
        reach = 0
        for stride, many in sorted(self._strides):
            if (stride > 0) != (many > 1) or (many > 1 and stride <= reach):
                return False
            reach += stride * (many - 1)
        return True

    @property
    def last_rank(self) -> int:
        """The highest rank that may have a piece."""
        return self.rank + sum(stride * (many - 1) for stride, many in self._strides)

    @property
    def ranks(self) -> list[int]:
        """All ranks that may have a piece."""
        found = [self.rank]
        for stride, many in self._strides:
            found = [rank + stride * number for rank in found for number in range(many)]
        return found

    def of(self, rank: int) -> Tile | None:
        """The rank's piece; None if it has none."""
        rest, strides = rank - self.rank, self._strides
        place = [0, 0, 0]
        for number in sorted(range(3), key=lambda number: -strides[number][0]):
            stride, many = strides[number]
            if stride:
                place[number], rest = divmod(rest, stride)
            if not 0 <= place[number] < many:
                return None
        return None if rest else self._piece(*place)

    def find(self, low: int, high: int) -> Iterator[tuple[int, Tile]]:
        """Rank and tile of the pieces in the rows that have elements [low, high), in order."""
        first = self.start // self.unit
        top, bottom = max(low // self.unit - first, 0), -(-high // self.unit) - first
        for part in range(top // self._part, self.parts):
            begin = part * self._part
            if begin >= bottom:
                return
            for cut in range(max(top - begin, 0) // self._cut, self.cuts):
                if begin + cut * self._cut >= bottom:
                    break
                rank = self.rank + part * self.step + cut * self.apart
                for band in range(self.bands):
                    piece = self._piece(part, cut, band)
                    if piece is not None:
                        yield rank + band * self.across, piece

    @property
    def _strides(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Stride of the rank, and how many there are: of parts, cuts and bands."""
        return (self.step, self.parts), (self.apart, self.cuts), (self.across, self.bands)

    @property
    def _part(self) -> int:
        """Rows of a part."""
        return max(self.length // self.unit, 1)

    @property
    def _cut(self) -> int:
        """Rows of a cut; the last cut may have fewer."""
        return -(-self._part // self.cuts)

    def _piece(self, part: int, cut: int, band: int) -> Tile | None:
        top = part * self._part + cut * self._cut
        bottom = min(top + self._cut, (part + 1) * self._part, self.rows)
        left, right = self.columns
        columns = -(-(right - left) // self.bands)
        left += band * columns
        right = min(left + columns, right)
        if top >= bottom or left >= right:
            return None
        begin = (self.start // self.unit + top) * self.unit
        if not self.stride:
            return Tile(begin, begin + (bottom - top) * self.unit)
        return Tile(begin + left, begin + right, self.width, bottom - top)


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


def require_tiled(boxes: Iterable[Box], rows: int, width: int) -> None:
    """Raise CoverageError unless the boxes are disjoint and together all rows.

    How often an element is there follows from the corners above and to the left of it, two of each
    box counted as 1 and two as -1. So all is there once if corners add up to those of the whole.
    """
    corners: Counter[tuple[int, int]] = Counter()
    for sign, (top, bottom, left, right, *_) in (
        (-1, Box(0, rows, 0, width, 0, width)), *((1, box) for box in boxes)
    ):  # fmt: skip
        corners[top, left] += sign
        corners[bottom, right] += sign
        corners[top, right] -= sign
        corners[bottom, left] -= sign
    wrong = min(((*corner, found) for corner, found in corners.items() if found), default=None)
    if wrong is None:
        return
    row, column, found = wrong
    if row >= rows or column >= width:
        raise CoverageError(f"reaches beyond element {rows * width}")
    what = "is there twice" if found > 0 else "is missing"
    raise CoverageError(f"element {row * width + column} {what}")


def require_whole(runs: Iterable[Sequence[Run]], numels: Mapping[str, int], ranks: int) -> None:
    """Raise CoverageError, naming the tensor, unless the runs hold every tensor once, on existing
    ranks."""
    for own, (key, numel) in zip(runs, numels.items(), strict=True):
        try:
            if any(run.stride and numel % run.stride for run in own):
                raise CoverageError(
                    f"{numel} elements do not make whole rows of the length that it is divided by"
                )
            width = row_width(own)
            if all(run.has_whole_rows for run in own):
                require_cover([(run.start, run.stop) for run in own], numel)
            else:
                boxes = (box for run in own for box in _boxes(run, width))
                require_tiled(boxes, numel // width, width)
        except CoverageError as error:
            raise CoverageError(f"{key}: {error}") from None
        for run in own:
            if not run.is_unambiguous or run.last_rank >= ranks:
                raise CoverageError(f"{key}: divided among ranks that do not exist")


def row_lengths(shape: Sequence[int]) -> list[int]:
    """Lengths of the rows that a tensor has by its shape: one for each dimension but the first."""
    return [math.prod(shape[dim:]) for dim in range(1, len(shape))]


def row_width(runs: Iterable[Run]) -> int:
    """Elements of a row, where pieces are columns of rows; 0 where all are flat. Raises
    CoverageError for rows of different lengths."""
    widths = {run.stride for run in runs} - {0}
    if len(widths) > 1:
        raise CoverageError("is divided by columns of rows of different lengths")
    return widths.pop() if widths else 0


def _boxes(run: Run, width: int) -> Iterator[Box]:
    """The boxes that make up a run."""
    left, right = run.columns
    if run.has_whole_rows:
        yield from Tile(run.start, run.stop).boxes(width)
    elif left < right and run.start < run.stop:
        top = run.start // width
        yield Box(top, top + run.rows, left, right, 0, right - left)
    else:
        raise CoverageError("has a part without columns")
