"""Whole matrices of parameters that ranks divide: each is computed by one rank, its owner.

Owners are balanced by the cost of a matrix. Parts are sent to the owner and results back, bucket
by bucket, by all-to-alls among all ranks that hold the parameters. So a matrix is computed once,
from the same values in the same place, whatever divides it, and copies get equal bits.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from pipeline import StageError
from pipeline.utils import local_part, with_values
from stages.wrap.shards import Ranges, held_ranges

LOCAL_ELEMENTS = 1 << 25
"""Elements of a rank's parts in a bucket, if these are of a matrix for each rank or more. Buffers
take about four times their memory."""


@dataclass(eq=False)
class MatrixExchange:
    """The `WholeMatrices` of plain tensors, which all ranks hold, and of DTensors."""

    _buckets: dict[tuple[int, ...], list[_Bucket]] = field(default_factory=dict)
    _groups: dict[tuple[int, ...], ProcessGroup | None] = field(default_factory=dict)

    def __call__(
        self,
        parameters: Iterable[nn.Parameter],
        part: Callable[[nn.Parameter], Tensor],
        function: Callable[[Tensor], Tensor],
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """See `WholeMatrices`. Raises StageError for parameters that are not regularly divided, and
        for results of another size."""
        listed = list(parameters)
        key = tuple(map(id, listed))  # buckets keep the parameters, so nothing else has these
        if key not in self._buckets:
            self._buckets[key] = list(self._made(listed))
        for bucket in self._buckets[key]:
            yield from bucket.run(part, function)

    def _made(self, parameters: Iterable[nn.Parameter]) -> Iterator[_Bucket]:
        """The parameters in buckets, largest matrices first, so that the matrices of a bucket are
        of about equal size."""
        by_ranks: dict[tuple[int, ...], list[_Layout]] = defaultdict(list)
        for layout in map(_layout, parameters):
            by_ranks[layout.ranks].append(layout)
        for ranks, layouts in by_ranks.items():
            if len(ranks) > 1 and ranks not in self._groups:  # collective among these ranks
                everyone = len(ranks) == dist.get_world_size()
                self._groups[ranks] = (
                    dist.group.WORLD
                    if everyone
                    else dist.new_group(list(ranks), use_local_synchronization=True)
                )
            group, work = self._groups.get(ranks), [0] * len(ranks)
            bucket, matrices, elements = list[_Layout](), 0, 0
            for layout in sorted(layouts, key=lambda one: -one.cost):
                bucket.append(layout)
                matrices += math.prod(layout.shape[:-2])
                elements += math.prod(layout.shape) * len({*layout.copies}) // len(ranks)
                if matrices >= len(ranks) and elements >= LOCAL_ELEMENTS:
                    yield _Bucket(bucket, work, group)
                    bucket, matrices, elements = [], 0, 0
            if bucket:
                yield _Bucket(bucket, work, group)


class _Layout(NamedTuple):
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
    def cost(self) -> int:
        """Work of a matrix: multiplications of a product with its own transpose."""
        rows, columns = self.shape[-2:]
        return rows * columns * min(rows, columns)


def _layout(parameter: nn.Parameter) -> _Layout:
    """The layout of a DTensor, or of a tensor that all ranks hold. Raises StageError for a
    placement that does not divide."""
    extra = max(2 - parameter.ndim, 0)
    shape = (1,) * extra + tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        ranks = tuple(range(dist.get_world_size() if dist.is_initialized() else 1))
        everything = [[(0, size)] if size else [] for size in shape]
        return _Layout(parameter, shape, ranks, [everything] * len(ranks), [(n,) for n in ranks])
    mesh, outer = parameter.device_mesh, [[(0, 1)]] * extra
    axes = [axis for axis, one in enumerate(parameter.placements) if one.is_replicate()]
    places = itertools.product(*map(range, mesh.shape))
    with with_values():  # groups number their ranks in this order
        found = sorted(zip(mesh.mesh.flatten().tolist(), places, strict=True))
    return _Layout(
        parameter,
        shape,
        ranks=tuple(rank for rank, _ in found),
        held=[outer + held_ranges(parameter, place)[0] for _, place in found],
        copies=[tuple(place[axis] for axis in axes) for _, place in found],
    )


def _placed(ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    """Each range, and the place at which it begins among all of them."""
    begin = 0
    for low, high in ranges:
        yield low, high, begin
        begin += high - low


class _Matrix(NamedTuple):
    """A matrix of the parameter number `of` in a bucket, and its place in the dimensions before the
    last two."""

    of: int
    place: tuple[int, ...]


class _Piece(NamedTuple):
    """A rank's rows and columns of a matrix."""

    matrix: _Matrix
    at: tuple[int, ...]
    """Its place in the rank's part of the parameter."""
    of_owner: bool
    """Whether the rank has a part of the copy of the parameter that the matrix's owner has."""
    rows: Ranges
    columns: Ranges

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        rows, columns = (sum(high - low for low, high in one) for one in (self.rows, self.columns))
        return rows, columns


Route = list[_Piece]
"""Pieces that one rank sends another, in order."""


class _Bucket:
    """Parameters whose matrices are exchanged together."""

    def __init__(
        self, layouts: Sequence[_Layout], work: list[int], group: ProcessGroup | None
    ) -> None:
        """`work` is the work of each rank so far; the bucket adds its own."""
        self._layouts, self._group = layouts, group
        own, everyone = 0 if group is None else dist.get_rank(group), range(len(work))
        owned: list[list[_Matrix]] = [[] for _ in work]
        for of, layout in enumerate(layouts):
            for place in itertools.product(*map(range, layout.shape[:-2])):
                owner = work.index(min(work))  # the same on every rank
                work[owner] += layout.cost
                owned[owner].append(_Matrix(of, place))
        self._owned = owned[own]

        def route(owner: int, holder: int) -> Route:
            """The pieces that `holder` has of the matrices of `owner`."""
            found = []
            for matrix in owned[owner]:
                *outer, rows, columns = layouts[matrix.of].held[holder]
                at = [
                    begin + number - low
                    for ranges, number in zip(outer, matrix.place, strict=True)
                    for low, high, begin in _placed(ranges)
                    if low <= number < high
                ]
                if len(at) == len(outer) and rows and columns:
                    copies = layouts[matrix.of].copies
                    same = copies[owner] == copies[holder]
                    found.append(_Piece(matrix, tuple(at), same, rows, columns))
            return found

        self._back = [route(rank, own) for rank in everyone]
        """By owner: pieces of results that come back to this rank."""
        self._results = [route(own, rank) for rank in everyone]
        """By rank: pieces of results that this rank sends, to all copies."""
        self._sent, self._taken = (
            [[piece for piece in one if piece.of_owner] for one in routes]
            for routes in (self._back, self._results)
        )

    def run(
        self, part: Callable[[nn.Parameter], Tensor], function: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the bucket's parameters with their parts of the results (collective). Raises
        StageError for parts of several dtypes."""
        parts = [local_part(part(one.parameter)) for one in self._layouts]
        parts = [one.view((1,) * max(2 - one.ndim, 0) + tuple(one.shape)) for one in parts]
        dtype, *others = {part.dtype for part in parts}
        if others:
            raise StageError(f"parts of whole matrices have dtypes {dtype} and {others[0]}")
        # Offloaded parameters are exchanged on the mesh's device.
        device, mesh = parts[0].device, getattr(self._layouts[0].parameter, "device_mesh", None)
        if mesh is not None and mesh.device_type != device.type:
            device = torch.device(mesh.device_type, torch.accelerator.current_device_index())
        like = torch.empty(0, dtype=dtype, device=device)
        whole = {one: like.new_empty(self._layouts[one.of].shape[-2:]) for one in self._owned}
        sent = like.new_empty(sum(_elements(self._sent)))
        for buffer, piece in _pieces(sent, self._sent):
            buffer.copy_(parts[piece.matrix.of][piece.at])
        if any(len({*one.copies}) < len(one.ranks) for one in self._layouts):  # they are divided
            sent = self._exchanged(sent, self._sent, self._taken)
        for block, inside in _blocks(sent, self._taken, whole):
            block.copy_(inside)
        for matrix, tensor in whole.items():
            vector = self._layouts[matrix.of].parameter.ndim < 2
            result = function(tensor[0] if vector else tensor)
            if result.numel() != tensor.numel():
                raise StageError(
                    f"of a matrix of shape {tuple(tensor.shape)}, the optimizer has made one of "
                    f"shape {tuple(result.shape)}"
                )
            whole[matrix] = result.reshape(tensor.shape)
        results = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in parts]
        sent = like.new_empty(sum(_elements(self._results)))
        for block, inside in _blocks(sent, self._results, whole):
            inside.copy_(block)
        sent = self._exchanged(sent, self._results, self._back)
        for buffer, piece in _pieces(sent, self._back):
            results[piece.matrix.of][piece.at].copy_(buffer)
        for (parameter, *_), result in zip(self._layouts, results, strict=True):
            own = result.view(local_part(parameter).shape)
            if isinstance(parameter, DTensor):
                own = DTensor.from_local(
                    own, parameter.device_mesh, parameter.placements, run_check=False,
                    shape=parameter.shape, stride=parameter.stride(),
                )  # fmt: skip
            yield parameter, own

    def _exchanged(
        self, sent: Tensor, outgoing: Sequence[Route], incoming: Sequence[Route]
    ) -> Tensor:
        """What other ranks have sent, if there are any (collective)."""
        if self._group is None:
            return sent
        out, into = _elements(outgoing), _elements(incoming)
        received = sent.new_empty(sum(into))
        dist.all_to_all_single(received, sent, into, out, group=self._group)
        return received


def _elements(routes: Iterable[Route]) -> list[int]:
    """Number of elements that each route sends."""
    return [sum(math.prod(piece.shape) for piece in route) for route in routes]


def _pieces(memory: Tensor, routes: Iterable[Route]) -> Iterator[tuple[Tensor, _Piece]]:
    """Each piece after its part of the memory."""
    begin = 0
    for piece in itertools.chain(*routes):
        end = begin + math.prod(piece.shape)
        yield memory[begin:end].view(piece.shape), piece
        begin = end


def _blocks(
    memory: Tensor, routes: Iterable[Route], whole: Mapping[_Matrix, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of each block of the pieces, in its whole matrix and in the memory."""
    for part, piece in _pieces(memory, routes):
        for (top, bottom, row), (left, right, column) in itertools.product(
            _placed(piece.rows), _placed(piece.columns)
        ):
            inside = part[row : row + bottom - top, column : column + right - left]
            yield whole[piece.matrix][top:bottom, left:right], inside
