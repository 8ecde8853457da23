"""Cross-entropy of a linear head, some tokens at a time, so that all logits are never in memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.contracts.data import NO_TARGET

PIECE = 1 << 26
"""Elements of a product that are made at a time where they are then added in another dtype."""


def linear_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: int
) -> Tensor:
    """Cross-entropy in nats, summed over the target tokens, as an fp32 scalar.

    Shapes: hidden (tokens, width), weight (vocabulary, width), bias (vocabulary,), labels (tokens,)
    of int64. The logits of `chunk` tokens are in memory at a time, in the dtype of `hidden` and in
    fp32. The same numbers as with all logits at once: products in the dtype of `hidden`, softmax in
    fp32 (torch's own `linear_cross_entropy` rounds the sum to the dtype of `hidden`).

    Gradients are computed with the loss (Hsu et al. 2024, Liger Kernel, section 3.2), those of the
    weight summed over chunks in fp32.
    """
    if not torch.is_grad_enabled():  # which a Function is not told
        hidden, weight, bias = (
            hidden.detach(),
            weight.detach(),
            None if bias is None else bias.detach(),
        )
    summed: Tensor = _LinearLoss.apply(hidden, weight, bias, labels, chunk)  # type: ignore[no-untyped-call]
    return summed


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: int
    ) -> Tensor:
        wanted = ctx.needs_input_grad
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        slopes = _Slopes(
            torch.empty_like(hidden) if wanted[0] else None,
            torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None,
            torch.zeros_like(bias, dtype=torch.float32) if wanted[2] else None,  # type: ignore[arg-type]
        )
        for start in range(0, len(hidden), chunk):
            # In a function, whose tensors are gone before the next chunk's are made.
            total += _chunk(hidden, weight, bias, labels, slice(start, start + chunk), slopes)
        for_hidden, for_weight, for_bias = slopes
        del slopes
        # Not as saved tensors, which may not be scaled in place: the weight's is a large one.
        ctx.slopes = [
            for_hidden,
            None if for_weight is None else for_weight.to(weight.dtype),
            None if for_bias is None or bias is None else for_bias.to(bias.dtype),
        ]
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        slopes, ctx.slopes = ctx.slopes, None
        if slopes is None:
            raise RuntimeError("the loss in chunks can be differentiated once")
        scaled = [None if one is None else one.mul_(upstream.to(one.dtype)) for one in slopes]
        return *scaled, None, None


class _Slopes(NamedTuple):
    """Gradients that chunks add to, each its own rows or all; None where none is wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def _chunk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    rows: slice,
    slopes: _Slopes,
) -> Tensor:
    """Summed loss of some tokens."""
    some, their = hidden[rows], labels[rows]
    logits = F.linear(some, weight, bias).float()
    loss = F.cross_entropy(logits, their, ignore_index=NO_TARGET, reduction="sum")
    if slopes == (None, None, None):
        return loss
    slope = _slope(logits, their)
    narrow = slope.to(hidden.dtype)
    if slopes.hidden is not None:
        slopes.hidden[rows] = narrow @ weight
    if slopes.weight is not None:
        _add_product(slopes.weight, narrow, some)
    if slopes.bias is not None:
        slopes.bias.add_(slope.sum(0))
    return loss


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total` += left^T right in fp32, without a second matrix of its size."""
    if left.dtype == total.dtype:
        total.addmm_(left.T, right)
        return
    height = max(PIECE // total.shape[1], 1)
    parts = zip(torch.split(total, height), torch.split(left, height, dim=1), strict=True)
    for rows, columns in parts:
        rows.add_(columns.T @ right)


def _slope(logits: Tensor, labels: Tensor) -> Tensor:
    """Gradient of the summed cross-entropy, in the memory of `logits`: softmax minus one at the
    target, and nothing where there is none."""
    torch.softmax(logits, dim=-1, out=logits)
    trained = labels != NO_TARGET
    rows = torch.arange(len(labels), device=labels.device)
    logits[rows, labels.clamp(min=0)] -= trained.to(logits.dtype)
    return logits.mul_(trained[:, None])
