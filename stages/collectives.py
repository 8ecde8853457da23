"""Collectives over the ranks of a tensor-parallel or context-parallel group, with gradients.

A value is complete (the same on every rank), a summand (the ranks' values add up to it), or sharded
along a dimension. Each function says which it takes and returns; its gradient goes the other way.
The sequence is dimension 1 of (samples, length, width)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from stages.collectives_compat import all_gather_single, reduce_scatter_single

SEQUENCE = 1
Operation = Callable[[Tensor, ProcessGroup, int], Tensor]


def all_reduce(value: Tensor, group: ProcessGroup) -> Tensor:
    """Summand -> complete value. The gradient is complete."""
    return _Collective.apply(value, _summed, _same, group, 0)  # type: ignore[no-any-return, no-untyped-call]


def sum_gradients(value: Tensor, group: ProcessGroup) -> Tensor:
    """Complete value -> itself, used in different ways by the ranks: gradients are summands."""
    if not torch.is_grad_enabled() or not value.requires_grad:
        return value
    return _Collective.apply(value, _same, _summed, group, 0)  # type: ignore[no-any-return, no-untyped-call]


def gather(value: Tensor, group: ProcessGroup, dim: int, *, summands: bool) -> Tensor:
    """Sharded along `dim` -> complete value. Gradients are summands, or complete."""
    back, dim = _scattered if summands else _own_part, dim % value.dim()
    return _Collective.apply(value, _gathered, back, group, dim)  # type: ignore[no-any-return, no-untyped-call]


def split(value: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Complete value -> sharded along `dim`."""
    return _Collective.apply(value, _own_part, _gathered, group, dim % value.dim())  # type: ignore[no-any-return, no-untyped-call]


def reduce_scatter(value: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Summand -> sharded along `dim`."""
    return _Collective.apply(value, _scattered, _gathered, group, dim % value.dim())  # type: ignore[no-any-return, no-untyped-call]


def all_to_all(value: Tensor, group: ProcessGroup) -> Tensor:
    """Part i of the result is what rank i has as `value[number of this rank]`; its gradient goes
    back the same way."""
    return _Collective.apply(value, _exchanged, _exchanged, group, 0)  # type: ignore[no-any-return, no-untyped-call]


class _Collective(torch.autograd.Function):
    """An operation on a value, and another on its gradient."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, there: Operation, back: Operation, group: ProcessGroup, dim: int
    ) -> Tensor:
        ctx.back, ctx.group, ctx.dim = back, group, dim
        return there(value, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad, ctx.group, ctx.dim), None, None, None, None


def _same(value: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return value.view_as(value)


def _summed(value: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    total = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gathered(value: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    size = dist.get_world_size(group)
    parts = value.new_empty((size * value.shape[0], *value.shape[1:]))
    all_gather_single(parts, value.contiguous(), group=group)
    # A copy of its own: fully_shard warns of blocks that return views.
    return torch.cat(torch.unbind(parts.view(size, *value.shape)), dim)


def _scattered(value: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    parts = _parts(value, group, dim).movedim(dim, 0).contiguous()
    own = torch.empty_like(parts[0])
    reduce_scatter_single(own, parts.flatten(0, 1), group=group)
    return own


def _exchanged(value: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    sent = value.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


def _own_part(value: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return _parts(value, group, dim).select(dim, dist.get_rank(group)).contiguous()


def _parts(value: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """A view with `dim` divided in (rank, part). Raises ValueError if it does not divide."""
    size = dist.get_world_size(group)
    if value.shape[dim] % size:
        raise ValueError(f"a length of {value.shape[dim]} does not divide among {size} ranks")
    return torch.unflatten(value, dim, (size, value.shape[dim] // size))
