"""The cross-entropy of a linear head, with few tokens' logits in memory at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from pipeline.utils import local_part
from stages.train.logits_loss import LossOfLogits, loss_of_logits
from stages.train.vocabulary import VocabularyShard

PIECE = 1 << 26
"""Elements of a product that are computed at a time to be added in another dtype."""


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    chunk: int,
    of_logits: LossOfLogits = loss_of_logits,
) -> Tensor:
    """Cross-entropy of a linear head in nats, summed over the target tokens, as an fp32 scalar.

    Shapes: hidden (tokens, width), weight (vocabulary, width), bias (vocabulary,), labels (tokens,)
    of int64. The logits of `chunk` tokens are in memory at a time, in the dtype of `hidden` and in
    fp32; `of_logits` makes loss and gradient of them. Numbers are those of all logits at once:
    products in the dtype of `hidden`, softmax in fp32 (torch's own `linear_cross_entropy` rounds
    the sum to the dtype of `hidden`).

    Gradients are computed with the loss (Hsu et al. 2024, Liger Kernel, section 3.2), those of the
    weight summed over chunks in fp32.

    `weight` and `bias` may be parts, by the vocabulary, on a mesh of one axis (`VocabularyShard`);
    `hidden` and `labels` are then equal on all of them, and so are the loss and the gradient of
    `hidden`.
    """
    shard = VocabularyShard.find(weight)
    weight = local_part(weight)
    bias = None if bias is None else local_part(bias)
    if not torch.is_grad_enabled():  # a Function does not see this
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    group = None
    if shard is not None:
        of_logits, group = shard.loss_of_logits, shard.group
    summed: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, labels, chunk, of_logits, group
    )
    return summed


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        chunk: int,
        of_logits: LossOfLogits,
        group: ProcessGroup | None,
    ) -> Tensor:
        wanted = ctx.needs_input_grad
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grads = _Gradients(
            torch.empty_like(hidden) if wanted[0] else None,
            torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None,
            torch.zeros_like(bias, dtype=torch.float32) if wanted[2] else None,  # type: ignore[arg-type]
        )
        for start in range(0, len(hidden), chunk):
            # A function of its own, whose tensors are freed before the next chunk.
            rows = slice(start, start + chunk)
            total += _chunk(hidden, weight, bias, labels, rows, grads, of_logits)
        if group is not None and grads.hidden is not None:
            torch.distributed.all_reduce(grads.hidden, group=group)
        # Not as saved tensors, which may not be scaled in place: the weight's is a large one.
        ctx.grads = [
            None if grad is None or parameter is None else grad.to(parameter.dtype)
            for grad, parameter in zip(grads, (hidden, weight, bias), strict=True)
        ]
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError("the loss in chunks can be differentiated once")
        scaled = [None if grad is None else grad.mul_(upstream.to(grad.dtype)) for grad in grads]
        return *scaled, None, None, None, None


class _Gradients(NamedTuple):
    """Gradients to which chunks add, to `hidden` in their own rows; None if not needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def _chunk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    rows: slice,
    grads: _Gradients,
    of_logits: LossOfLogits,
) -> Tensor:
    """Add the gradients of the tokens `rows`; returns their summed loss."""
    logits = F.linear(hidden[rows], weight, bias)
    loss, gradient = of_logits(logits, labels[rows], grads != (None, None, None))
    del logits
    if gradient is None:
        return loss
    if grads.hidden is not None:
        torch.mm(gradient, weight, out=grads.hidden[rows])
    if grads.weight is not None:
        _add_product(grads.weight, gradient, hidden[rows])
    if grads.bias is not None:
        grads.bias.add_(gradient.sum(0, dtype=torch.float32))
    return loss


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total` += left^T right in fp32, without a second matrix of its size."""
    if left.dtype == total.dtype:
        total.addmm_(left.T, right)
    elif total.is_cuda:  # the one device where torch adds a product to another dtype
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)
    else:
        height = max(PIECE // total.shape[1], 1)
        parts = zip(torch.split(total, height), torch.split(left, height, dim=1), strict=True)
        for rows, columns in parts:
            rows.add_(columns.T @ right)
