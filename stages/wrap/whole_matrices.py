"""Whole matrices of parameters that ranks divide: each is computed by one rank, its owner.

Owners are balanced by the cost of a matrix. Parts are sent to the owner and results back, bucket
by bucket, by all-to-alls among all ranks that hold the parameters. So a matrix is computed once,
from the same values in the same place, whatever divides it, and copies get equal bits.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from pipeline import StageError
from pipeline.utils import local_part
from stages.wrap.matrix_places import Layout, Piece, layout_of

LOCAL_ELEMENTS = 1 << 25
"""Elements of a rank's parts in a bucket, if these are of a matrix for each rank or more. Buffers
take about four times their memory."""


class MatrixExchange:
    """The `WholeMatrices` of plain tensors, which all ranks hold, and of DTensors."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[int, ...], list[_Bucket]] = {}
        self._group = functools.cache(_group)

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
            self._buckets[key] = list(_buckets(listed, self._group))
        for bucket in self._buckets[key]:
            yield from bucket.run(part, function)


def _buckets(
    parameters: Iterable[nn.Parameter], group_of: Callable[[tuple[int, ...]], ProcessGroup | None]
) -> Iterator[_Bucket]:
    """The parameters in buckets, largest matrices first, so that the matrices of a bucket are of
    about equal size."""
    by_ranks: dict[tuple[int, ...], list[Layout]] = {}
    for layout in map(layout_of, parameters):
        by_ranks.setdefault(layout.ranks, []).append(layout)
    for ranks, layouts in by_ranks.items():
        group, work = group_of(ranks), [0] * len(ranks)
        bucket: list[Layout] = []
        for layout in sorted(layouts, key=lambda one: -one.cost):
            bucket.append(layout)
            matrices = sum(math.prod(one.shape[:-2]) for one in bucket)
            elements = sum(
                math.prod(one.shape) * len({*one.copies}) // len(ranks) for one in bucket
            )
            if matrices >= len(ranks) and elements >= LOCAL_ELEMENTS:
                yield _Bucket(bucket, work, group)
                bucket = []
        if bucket:
            yield _Bucket(bucket, work, group)


def _group(ranks: tuple[int, ...]) -> ProcessGroup | None:
    """The group of these ranks (collective among them); None for one rank."""
    if len(ranks) == 1:
        return None
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    group: ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    return group


class _Matrix(NamedTuple):
    """A matrix of the parameter number `of` in a bucket."""

    of: int
    place: tuple[int, ...]
    owner: int


Route = list[tuple[_Matrix, Piece]]
"""Pieces that one rank sends another, in order."""


class _Bucket:
    """Parameters whose matrices are exchanged together."""

    def __init__(
        self, layouts: Sequence[Layout], work: list[int], group: ProcessGroup | None
    ) -> None:
        """`work` is the work of each rank so far, to which that of this bucket is added."""
        self._layouts, self._group = layouts, group
        own, everyone = 0 if group is None else dist.get_rank(group), range(len(work))
        matrices = [
            _Matrix(number, place, _least_busy(work, layout.cost))
            for number, layout in enumerate(layouts)
            for place in layout.matrices
        ]
        self._owned = [matrix for matrix in matrices if matrix.owner == own]
        self._back = [self._route(matrices, rank, own) for rank in everyone]
        """By owner: pieces of results that come back to this rank."""
        self._results = [self._route(self._owned, own, rank) for rank in everyone]
        """By rank: pieces of results that this rank sends, to all copies."""
        self._sent = [self._same_copy(route, own) for route in self._back]
        self._taken = [self._same_copy(route, rank) for rank, route in enumerate(self._results)]

    def _route(self, matrices: Iterable[_Matrix], owner: int, holder: int) -> Route:
        """The pieces that `holder` has of the matrices of `owner`."""
        found = (
            (matrix, self._layouts[matrix.of].piece(holder, matrix.place))
            for matrix in matrices
            if matrix.owner == owner
        )
        return [(matrix, piece) for matrix, piece in found if piece is not None]

    def _same_copy(self, route: Route, holder: int) -> Route:
        """The pieces that belong to the owner's copy of a parameter."""
        copies = [layout.copies for layout in self._layouts]
        return [
            (matrix, piece)
            for matrix, piece in route
            if copies[matrix.of][matrix.owner] == copies[matrix.of][holder]
        ]

    def run(
        self, part: Callable[[nn.Parameter], Tensor], function: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the bucket's parameters with their parts of the results (collective)."""
        parts = [_with_dims(local_part(part(one.parameter))) for one in self._layouts]
        whole = self._gathered(parts)
        for matrix, tensor in whole.items():
            vector = self._layouts[matrix.of].parameter.ndim < 2
            result = function(tensor[0] if vector else tensor)
            if result.numel() != tensor.numel():
                raise StageError(
                    f"of a matrix of shape {tuple(tensor.shape)}, the optimizer has made one of "
                    f"shape {tuple(result.shape)}"
                )
            whole[matrix] = result.reshape(tensor.shape)
        for layout, result in zip(self._layouts, self._returned(whole, parts), strict=True):
            yield layout.parameter, _sharded_as(layout.parameter, result)

    def _gathered(self, parts: Sequence[Tensor]) -> dict[_Matrix, Tensor]:
        """The matrices that this rank owns, of all ranks' parts."""
        sent = self._memory(self._sent, parts)
        whole = {one: sent.new_empty(self._layouts[one.of].shape[-2:]) for one in self._owned}
        for buffer, matrix, piece in _buffers(sent, self._sent):
            buffer.copy_(parts[matrix.of][piece.at])
        divided = any(len({*one.copies}) < len(one.ranks) for one in self._layouts)
        received = self._exchanged(sent, self._sent, self._taken) if divided else sent
        for buffer, matrix, piece in _buffers(received, self._taken):
            for block, inside in piece.blocks(whole[matrix], buffer):
                block.copy_(inside)
        return whole

    def _returned(self, whole: dict[_Matrix, Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
        """This rank's parts of all owners' results, like `parts`."""
        sent = self._memory(self._results, parts)
        for buffer, matrix, piece in _buffers(sent, self._results):
            for block, inside in piece.blocks(whole[matrix], buffer):
                inside.copy_(block)
        received = sent
        if self._group is not None:
            received = self._exchanged(sent, self._results, self._back)
        results = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in parts]
        for buffer, matrix, piece in _buffers(received, self._back):
            results[matrix.of][piece.at].copy_(buffer)
        return results

    def _memory(self, routes: Iterable[Route], parts: Sequence[Tensor]) -> Tensor:
        """Memory for all pieces, of the parts' dtype and on the device that exchanges them: that of
        the mesh, for offloaded parameters too. Raises StageError for several dtypes."""
        dtype, *others = {part.dtype for part in parts}
        if others:
            raise StageError(f"parts of whole matrices have dtypes {dtype} and {others[0]}")
        device, mesh = parts[0].device, getattr(self._layouts[0].parameter, "device_mesh", None)
        if mesh is not None and mesh.device_type != device.type:
            index = torch.accelerator.current_device_index()
            device = torch.device(mesh.device_type, index)
        return torch.empty(sum(map(_elements, routes)), dtype=dtype, device=device)

    def _exchanged(
        self, sent: Tensor, outgoing: Sequence[Route], incoming: Sequence[Route]
    ) -> Tensor:
        """The memory of incoming pieces, which other ranks have sent (collective)."""
        out, into = ([_elements(route) for route in routes] for routes in (outgoing, incoming))
        received = sent.new_empty(sum(into))
        dist.all_to_all_single(received, sent, into, out, group=self._group)
        return received


def _least_busy(work: list[int], cost: int) -> int:
    """The rank with the least work, to which `cost` is added; the same on every rank."""
    owner = work.index(min(work))
    work[owner] += cost
    return owner


def _elements(route: Route) -> int:
    return sum(math.prod(piece.shape) for _, piece in route)


def _buffers(memory: Tensor, routes: Iterable[Route]) -> Iterator[tuple[Tensor, _Matrix, Piece]]:
    """A part of the memory for each piece."""
    begin = 0
    for matrix, piece in itertools.chain(*routes):
        end = begin + math.prod(piece.shape)
        yield memory[begin:end].view(piece.shape), matrix, piece
        begin = end


def _with_dims(local: Tensor) -> Tensor:
    """A rank's part with at least two dimensions."""
    return local.view((1,) * max(2 - local.ndim, 0) + tuple(local.shape))


def _sharded_as(parameter: nn.Parameter, result: Tensor) -> Tensor:
    """This rank's part of a result as a tensor like the parameter."""
    own = result.view(local_part(parameter).shape)
    if not isinstance(parameter, DTensor):
        return own
    return DTensor.from_local(
        own, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
