"""The cross-entropy of a linear head, with few tokens' logits in memory at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor

from pipeline import NO_TARGET
from pipeline.utils import local_part
from stages.train.vocabulary import VocabularyShard

PIECE = 1 << 26
"""Elements of a product that are computed at a time to be added in another dtype."""


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: int
) -> Tensor:
    """Cross-entropy of a linear head in nats, summed over the target tokens, as an fp32 scalar.

    Shapes: hidden (tokens, width), weight (vocabulary, width), bias (vocabulary,), labels (tokens,)
    of int64. The logits of `chunk` tokens are in memory at a time, in the dtype of `hidden` and in
    fp32. Numbers are those of all logits at once: products in the dtype of `hidden`, softmax in
    fp32 (torch's own `linear_cross_entropy` rounds the sum to the dtype of `hidden`).

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
    summed: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, bias, labels, chunk, shard)  # type: ignore[no-untyped-call]
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
        shard: VocabularyShard | None,
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
            total += _chunk(hidden, weight, bias, labels, rows, grads, shard)
        if shard is not None and grads.hidden is not None:
            torch.distributed.all_reduce(grads.hidden, group=shard.group)
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
        return *scaled, None, None, None


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
    shard: VocabularyShard | None,
) -> Tensor:
    """Add the gradients of the tokens `rows`; returns their summed loss."""
    logits = F.linear(hidden[rows], weight, bias).float()
    if shard is None:
        loss = F.cross_entropy(logits, labels[rows], ignore_index=NO_TARGET, reduction="sum")
        if grads == (None, None, None):
            return loss
        grad = _logits_gradient(logits, labels[rows])
    else:
        loss, grad = shard.loss_and_gradient(logits, labels[rows])
    narrow = grad.to(hidden.dtype)
    if grads.hidden is not None:
        grads.hidden[rows] = narrow @ weight
    if grads.weight is not None:
        _add_product(grads.weight, narrow, hidden[rows])
    if grads.bias is not None:
        grads.bias.add_(grad.sum(0))
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


def _logits_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    """Gradient of the summed cross-entropy, in the memory of `logits`: softmax minus one at the
    target; zero for tokens without target."""
    torch.softmax(logits, dim=-1, out=logits)
    trained = labels != NO_TARGET
    rows = torch.arange(len(labels), device=labels.device)
    logits[rows, labels.clamp(min=0)] -= trained.to(logits.dtype)
    return logits.mul_(trained[:, None])
