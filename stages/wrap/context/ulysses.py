"""Exchange of attention heads for parts of the sequence (Ulysses, Jacobs et al. 2023)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def gather_sequence(states: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Give every rank the whole sequence of its share of the heads.

    Each of `states` has shape (samples, heads, length, width) and holds this rank's slice of the
    sequence. The results have shape (samples, heads / ranks, length * ranks, width), ranks being
    those of `group`. Heads that do not divide, as of keys and values, are repeated until they do.
    One all-to-all for all of `states`.
    """
    ranks = dist.get_world_size(group)
    shares = [_head_shares(state, ranks) for state in states]
    received = all_to_all(torch.cat([share.flatten(1) for share in shares], dim=1), group)
    parts = torch.split(received, [share[0].numel() for share in shares], dim=1)
    return [
        part.view(share.shape).movedim(0, 2).flatten(2, 3)
        for part, share in zip(parts, shares, strict=True)
    ]


def scatter_sequence(output: Tensor, group: ProcessGroup) -> Tensor:
    """Give every rank all heads of its slice of the sequence, from attention's output: shape
    (samples, length * ranks, heads / ranks, width) becomes (samples, length, heads, width)."""
    ranks = dist.get_world_size(group)
    slices = torch.unflatten(output, 1, (ranks, -1)).movedim(1, 0)
    return all_to_all(slices.contiguous(), group).movedim(0, 2).flatten(2, 3)


def copies(heads: int, ranks: int) -> int:
    """How often each head has to be repeated for all to divide among `ranks`."""
    return math.lcm(heads, ranks) // heads


def _head_shares(state: Tensor, ranks: int) -> Tensor:
    """From shape (samples, heads, length, width) to (ranks, samples, heads / ranks, length, width),
    as a view where no head is repeated."""
    repeats = copies(state.shape[1], ranks)
    if repeats > 1:
        state = state.repeat_interleave(repeats, dim=1)
    return torch.unflatten(state, 1, (ranks, -1)).movedim(1, 0)


def all_to_all(parts: Tensor, group: ProcessGroup) -> Tensor:
    """Send `parts[i]` to rank i of `group`; part i of the result comes from rank i. Differentiable.
    `parts` is contiguous."""
    exchanged: Tensor = _AllToAll.apply(parts, group)  # type: ignore[no-untyped-call]
    return exchanged


class _AllToAll(torch.autograd.Function):
    """Its own inverse, so its gradient is the same exchange."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchange(grads[0].contiguous(), ctx.group), None


def _exchange(parts: Tensor, group: ProcessGroup) -> Tensor:
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received
