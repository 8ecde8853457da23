"""Where ranks hold the matrices of a parameter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline.utils import with_values
from stages.wrap.shards import Ranges, held_ranges


class Piece(NamedTuple):
    """A rank's rows and columns of a matrix, which lie at place `at` of its part of a parameter."""

    at: tuple[int, ...]
    rows: Ranges
    columns: Ranges

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        rows, columns = (
            sum(high - low for low, high in ranges) for ranges in (self.rows, self.columns)
        )
        return rows, columns

    def blocks(self, whole: Tensor, own: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of each block of the piece, in the whole matrix and in the piece itself."""
        for (top, bottom), row in _placed(self.rows):
            for (left, right), column in _placed(self.columns):
                inside = own[row : row + bottom - top, column : column + right - left]
                yield whole[top:bottom, left:right], inside


class Layout(NamedTuple):
    """How ranks hold a parameter. Vectors count as matrices of one row."""

    parameter: nn.Parameter
    shape: tuple[int, ...]
    """At least two sizes."""
    ranks: tuple[int, ...]
    """Global numbers of all ranks that hold parts of it, in the order of their group."""
    held: Sequence[Sequence[Ranges]]
    """By number in the group: ranges of each dimension."""
    copies: Sequence[tuple[int, ...]]
    """By number in the group: the copy of the parameter that it has a part of."""

    @property
    def matrices(self) -> Iterator[tuple[int, ...]]:
        """Place of each matrix in the dimensions before the last two."""
        return itertools.product(*map(range, self.shape[:-2]))

    @property
    def cost(self) -> int:
        """Work of a matrix: multiplications of a product with its own transpose."""
        rows, columns = self.shape[-2:]
        return rows * columns * min(rows, columns)

    def piece(self, rank: int, matrix: tuple[int, ...]) -> Piece | None:
        """The piece of a matrix that a rank of the group holds; None if it holds nothing of it."""
        *outer, rows, columns = self.held[rank]
        places = [_position(ranges, one) for ranges, one in zip(outer, matrix, strict=True)]
        at = tuple(place for place in places if place is not None)
        held = len(at) == len(places) and rows and columns
        return Piece(at, rows, columns) if held else None


def layout_of(parameter: nn.Parameter) -> Layout:
    """The layout of a DTensor, or of a tensor that all ranks hold. Raises StageError for a
    placement that is no division."""
    extra = max(2 - parameter.ndim, 0)
    shape = (1,) * extra + tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        ranks = tuple(range(dist.get_world_size() if dist.is_initialized() else 1))
        everything = [[(0, size)] if size else [] for size in shape]
        return Layout(parameter, shape, ranks, [everything] * len(ranks), [(n,) for n in ranks])
    mesh, outer = parameter.device_mesh, [[(0, 1)]] * extra
    axes = [axis for axis, one in enumerate(parameter.placements) if one.is_replicate()]
    places = itertools.product(*map(range, mesh.shape))
    with with_values():  # groups number their ranks in this order
        found = sorted(zip(mesh.mesh.flatten().tolist(), places, strict=True))
    return Layout(
        parameter,
        shape,
        ranks=tuple(rank for rank, _ in found),
        held=[outer + held_ranges(parameter, place) for _, place in found],
        copies=[tuple(place[axis] for axis in axes) for _, place in found],
    )


def _placed(ranges: Ranges) -> Iterator[tuple[tuple[int, int], int]]:
    """Each range, and the place at which it begins among all of them."""
    begin = 0
    for low, high in ranges:
        yield (low, high), begin
        begin += high - low


def _position(ranges: Ranges, number: int) -> int | None:
    """Place of a number among the numbers in the ranges."""
    found = (begin + number - low for (low, high), begin in _placed(ranges) if low <= number < high)
    return next(found, None)
