"""Tiles, which are elements of a tensor, and the division of a checkpoint's tensors into them.

Portions of a tensor, from the engine to the files:

    Fragment   what an engine holds: elements and their values
    Tile       elements, by their numbers in the tensor
    Piece      a tile, and the rank that writes it; each element is in one piece
    Item       a piece of this rank, and its bytes in a file (`file_layout`)
    Write      bytes of an item that pass through the snapshot buffer in one round (`writer`)
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

from annotated_types import Ge
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer

Count = Annotated[int, Ge(0)]
Positive = Annotated[int, Ge(1)]


class CoverageError(ValueError):
    """Tiles overlap, leave a gap, or reach beyond the tensor."""


class Tile(NamedTuple):
    """Elements [start, stop) of a flattened tensor, and `count` - 1 runs more of the same length,
    each `stride` after the one before. A flat range has the stride 0 and the count 1; columns have
    the length of the tensor's rows as their stride, also in a single row. `stop` is the end of the
    first run, `end` the last one's.

    A tile counts elements of a tensor, or bytes where it is a `place` in a file.
    """

    start: Count
    stop: Count
    stride: Count = 0
    count: Positive = 1  # type: ignore[assignment]  # hides tuple.count

    @property
    def run(self) -> int:
        """Number of elements that follow each other."""
        return self.stop - self.start

    @property
    def numel(self) -> int:
        """Number of elements."""
        return (self.stop - self.start) * self.count

    @property
    def end(self) -> int:
        """Element of the tensor after the last one."""
        return self.stop + (self.count - 1) * self.stride

    def element(self, at: int) -> int:
        """Number within the tensor of the tile's element number `at`."""
        row, column = divmod(at, self.run)
        return self.start + row * self.stride + column

    def position(self, element: int) -> int | None:
        """Number within the tile of the tensor's element; None if the tile does not have it."""
        row, column = divmod(element - self.start, self.stride or self.run)
        found = 0 <= row < self.count and column < self.run
        return row * self.run + column if found else None

    def boxes(self, width: int) -> Iterator[Tile]:
        """The rectangles that make up the tile in rows of `width` elements, in order, each as a
        tile of that stride: of a flat range the end of a row, whole rows, the start of a row. The
        stride of the tile must be `width` or 0."""
        if self.stride:
            assert self.stride == width, f"rows of {self.stride} and of {width} elements"
            yield self
            return
        start = self.start
        for edge in (-(-start // width) * width, self.stop // width * width, self.stop):
            stop = min(edge, self.stop)
            if start < stop:
                rows = (stop - start) // width or 1
                yield Tile(start, start + min(stop - start, width), width, rows)
                start = stop

    def common(self, other: Tile, width: int) -> Iterator[Tile]:
        """The elements that two tiles share, as tiles of stride `width`, a row's elements."""
        for here, there in itertools.product(self.boxes(width), other.boxes(width)):
            (top, left), (row, column) = divmod(here.start, width), divmod(there.start, width)
            low, first = max(left, column), max(top, row)
            run = min(left + here.run, column + there.run) - low
            rows = min(top + here.count, row + there.count) - first
            if rows > 0 and run > 0:
                yield Tile(first * width + low, first * width + low + run, width, rows)

    def segments(self, begin: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Elements [begin, begin + size) as ranges: (first in the tensor, [low, high) of size)."""
        low = 0
        while low < size:
            row, column = divmod(begin + low, self.run)
            high = min(low + self.run - column, size)
            yield self.start + row * self.stride + column, low, high
            low = high


class Piece(NamedTuple):
    """A tile that rank number `rank` writes."""

    rank: Count
    start: Count
    stop: Count
    stride: Count = 0
    count: Positive = 1  # type: ignore[assignment]  # hides tuple.count


_Patterns = Annotated[
    Sequence[Sequence[Piece]],
    PlainSerializer(lambda all: [[one if one.stride else one[:3] for one in own] for own in all]),
]


class Division(BaseModel):
    """Which rank writes what. Most tensors share one of a few patterns, which list the pieces of
    all ranks; so its size grows with the ranks or the tensors, not with both."""

    model_config = ConfigDict(frozen=True, extra="forbid", serialize_by_alias=True)

    tensors: Sequence[Count]
    """Number of each tensor's pattern, in the order of the tensors."""
    patterns: _Patterns = Field(alias="layouts")

    @classmethod
    def of(cls, pieces: Iterable[Sequence[Piece]]) -> Division:
        """The division with these pieces of each tensor."""
        patterns: dict[tuple[Piece, ...], int] = {}
        tensors = [patterns.setdefault(tuple(own), len(patterns)) for own in pieces]
        return cls.model_construct(tensors=tensors, patterns=[*patterns])

    def of_rank(self, rank: int) -> list[tuple[int, Tile]]:
        """The tiles that a rank writes, each with its tensor's number, in order."""
        members, ranks = self._index
        found = [
            (tensor, tile)
            for pattern, tiles in ranks.get(rank, {}).items()
            for tensor in members[pattern]
            for tile in tiles
        ]
        return sorted(found, key=lambda one: one[0])

    def require_whole(self, tensors: Mapping[str, Sequence[int]], ranks: int) -> None:
        """Raise CoverageError, naming the tensor, unless every tensor, given by key and shape, is
        there once, on ranks below `ranks`, in columns of rows that its shape has."""
        known: set[tuple[int, tuple[int, ...]]] = set()
        for (key, shape), number in zip(tensors.items(), self.tensors, strict=True):
            if (number, tuple(shape)) in known:
                continue
            try:
                if number >= len(self.patterns):
                    raise CoverageError("has an unknown layout")
                width = require_cover(self.patterns[number], math.prod(shape))
                if width and width not in [math.prod(shape[dim:]) for dim in range(1, len(shape))]:
                    raise CoverageError("is divided by columns of other rows")
                if any(piece.rank >= ranks for piece in self.patterns[number]):
                    raise CoverageError("divided among ranks that do not exist")
            except CoverageError as error:
                raise CoverageError(f"{key}: {error}") from None
            known.add((number, tuple(shape)))

    @functools.cached_property
    def _index(self) -> tuple[dict[int, list[int]], dict[int, dict[int, list[Tile]]]]:
        """Tensors of each pattern; each rank's tiles in each pattern that it has some of."""
        members: dict[int, list[int]] = defaultdict(list)
        for tensor, pattern in enumerate(self.tensors):
            members[pattern].append(tensor)
        ranks: dict[int, dict[int, list[Tile]]] = defaultdict(dict)
        for number, pieces in enumerate(self.patterns):
            for piece in pieces:
                ranks[piece.rank].setdefault(number, []).append(Tile(*piece[1:]))
        return members, ranks


def require_cover(tiles: Iterable[Tile | Piece], numel: int) -> int:
    """The stride of columns, 0 if all are flat. Raises CoverageError unless all is there once."""
    own = sorted(Tile(*tile[-4:]) for tile in tiles)
    widths = {tile.stride for tile in own} - {0}
    if len(widths) > 1:
        raise CoverageError("is divided by columns of rows of different lengths")
    width = max(widths, default=0)
    for start, stop, stride, count in own:
        if start >= stop or (count > 1 and not stride):
            raise CoverageError(f"has a part without elements from {start} on")
        if stride and start % stride + stop - start > stride:
            raise CoverageError(f"has no columns {start} to {stop} in rows of {stride}")
    if width:
        if numel % width:
            raise CoverageError(
                f"{numel} elements do not make whole rows of the length that it is divided by"
            )
        _require_tiled((box for tile in own for box in tile.boxes(width)), numel // width, width)
        return width
    end = 0
    for start, stop, *_ in own:
        if start > end:
            raise CoverageError(f"elements {end} to {start} are missing")
        if start < end:
            raise CoverageError(f"elements {start} to {min(end, stop)} are there twice")
        end = stop
    if end != numel:
        raise CoverageError(f"ends at element {end} of {numel}")
    return 0


def _require_tiled(boxes: Iterable[Tile], rows: int, width: int) -> None:
    """Raise CoverageError unless the boxes are disjoint and are together all rows.

    How often an element is there is the sum of the corners above and to the left of it, two of
    each box count as 1 and two as -1. So everything is there once if the corners add up to the
    whole's."""
    corners: Counter[tuple[int, int]] = Counter()
    for sign, (start, stop, _, count) in (
        (-1, Tile(0, width, width, rows)), *((1, box) for box in boxes)
    ):  # fmt: skip
        top, left = divmod(start, width)
        bottom, right = top + count, left + stop - start
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
