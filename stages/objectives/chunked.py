"""Scores of a linear head, with few tokens' logits in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor

from pipeline import StageError
from pipeline.utils import local_part
from stages.objectives.logits import (
    OF_LABELS,
    LossOfLogits,
    ScoreColumns,
    VocabularyShard,
    loss_of_logits,
)

PIECE = 1 << 26
"""Elements of a product that are computed at a time to be added in another dtype."""


class _Work(NamedTuple):
    """Labels and settings of a computation for tokens, `chunk` at a time."""

    labels: Tensor
    chunk: int
    of_logits: LossOfLogits
    shard: VocabularyShard | None
    candidates: Tensor | None = None
    scores: ScoreColumns = OF_LABELS

    def slices(self) -> Iterator[slice]:
        """The tokens of each chunk."""
        starts = range(0, len(self.labels), self.chunk)
        return (slice(start, start + self.chunk) for start in starts)

    def scored(self, logits: Tensor, tokens: slice) -> Tensor:
        """The scores of `tokens` from their logits."""
        candidates = None if self.candidates is None else self.candidates[tokens]
        return self.scores(logits, self.labels[tokens], candidates, self.shard)


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: int,
    of_logits: LossOfLogits = loss_of_logits,
) -> Tensor:  # fmt: skip
    """Cross-entropy of a linear head in nats, summed over the target tokens, as an fp32 scalar.

    Shapes: hidden (tokens, width), weight (vocabulary, width), bias (vocabulary,), labels (tokens,)
    of int64. The logits of `chunk` tokens are in memory at a time, in the dtype of `hidden` and in
    fp32; `of_logits` makes loss and gradient of them. Numbers are as with all logits at once:
    products in the dtype of `hidden`, softmax in fp32 (torch's own `linear_cross_entropy` rounds
    the sum to the dtype of `hidden`).

    Gradients are computed with the loss (Hsu et al. 2024, Liger Kernel, section 3.2), the weight's
    summed over chunks in fp32.

    `weight` and `bias` may be parts, by the vocabulary, on a mesh of one axis (`VocabularyShard`);
    `hidden` and `labels` are then equal on all of them, and so are the loss and the gradient of
    `hidden`.
    """
    shard = VocabularyShard.find(weight)
    of_logits = of_logits if shard is None else shard.loss_of_logits
    work = _Work(labels, chunk, of_logits, shard)
    summed: Tensor = _ChunkedCrossEntropy.apply(*_locals(hidden, weight, bias), work)  # type: ignore[no-untyped-call]
    return summed


def chunked_scores(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, candidates: Tensor | None,
    chunk: int, scores: ScoreColumns, of_logits: LossOfLogits = loss_of_logits,
) -> Tensor:  # fmt: skip
    """The `scores` of each token, shape (tokens, columns), as `chunked_cross_entropy` computes one
    sum. Backward computes the logits of each chunk again."""
    shard = VocabularyShard.find(weight)
    hidden, weight, bias = _locals(hidden, weight, bias)
    work = _Work(labels, chunk, of_logits, shard, candidates, scores)
    if scores == OF_LABELS and not torch.is_grad_enabled():  # in the fewest passes over logits
        of_logits = of_logits if shard is None else shard.loss_of_logits
        losses = [
            of_logits(F.linear(hidden[tokens], weight, bias), labels[tokens], False)[0]
            for tokens in work.slices()
        ]
        return -torch.cat(losses)[:, None]
    columns: Tensor = _ChunkedScores.apply(hidden, weight, bias, work)  # type: ignore[no-untyped-call]
    return columns


def _locals(*tensors: Tensor | None) -> Iterator[Any]:
    """Local parts; a Function does not see that gradients are off, so they are detached then."""
    on = torch.is_grad_enabled()
    parts = (None if one is None else local_part(one) for one in tensors)
    return (one if on or one is None else one.detach() for one in parts)


class _ChunkedScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, work: _Work
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.work = work
        found = [
            work.scored(F.linear(hidden[tokens], weight, bias), tokens) for tokens in work.slices()
        ]
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        hidden, weight, bias = ctx.saved_tensors
        grads = _Gradients.needed(ctx, hidden, weight, bias)
        for tokens in ctx.work.slices():
            logits = F.linear(hidden[tokens], weight, bias).requires_grad_()
            with torch.enable_grad():
                found = ctx.work.scored(logits, tokens)
            (gradient,) = torch.autograd.grad(found, logits, upstream[tokens])
            grads.add(gradient, hidden, weight, tokens)
        return *grads.whole(ctx.work.shard, hidden, weight, bias), None


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, work: _Work
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grads = _Gradients.needed(ctx, hidden, weight, bias)
        for tokens in work.slices():
            # In a function, whose tensors are freed before the next chunk.
            total += _chunk(hidden, weight, bias, work, tokens, grads).sum()
        # Not as saved tensors, which may not be scaled in place: the weight's is a large one.
        ctx.grads = grads.whole(work.shard, hidden, weight, bias)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise StageError(
                "the loss in chunks is differentiated once, and this schedule does so twice",
                hint="compute the loss without chunks, or choose another schedule",
            )
        scaled = [None if grad is None else grad.mul_(upstream.to(grad.dtype)) for grad in grads]
        return *scaled, None


class _Gradients(NamedTuple):
    """Gradients to which chunks add, to `hidden` in their own tokens; None if not needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def needed(cls, ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> _Gradients:
        """Zeros for gradients that a function's context needs."""
        wanted = ctx.needs_input_grad
        return cls(
            torch.empty_like(hidden) if wanted[0] else None,
            torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None,
            torch.zeros_like(bias, dtype=torch.float32) if wanted[2] else None,  # type: ignore[arg-type]
        )

    def add(self, gradient: Tensor, hidden: Tensor, weight: Tensor, tokens: slice) -> None:
        """Add what the gradient of the logits of `tokens` makes of each."""
        if self.hidden is not None:
            torch.mm(gradient, weight, out=self.hidden[tokens])
        if self.weight is not None:
            _add_product(self.weight, gradient, hidden[tokens])
        if self.bias is not None:
            self.bias.add_(gradient.sum(0, dtype=torch.float32))

    def whole(self, shard: VocabularyShard | None, *inputs: Tensor | None) -> list[Tensor | None]:
        """The gradients in the dtypes of the inputs; the gradient by `hidden` is summed over the
        ranks that divide the vocabulary (collective)."""
        if shard is not None and self.hidden is not None:
            torch.distributed.all_reduce(self.hidden, group=shard.group)
        return [
            None if grad is None or one is None else grad.to(one.dtype)
            for grad, one in zip(self, inputs, strict=True)
        ]


def _chunk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, work: _Work, tokens: slice,
    grads: _Gradients,
) -> Tensor:  # fmt: skip
    """Add the gradients of `tokens`; returns their losses."""
    logits, wanted = F.linear(hidden[tokens], weight, bias), grads != (None, None, None)
    loss, gradient = work.of_logits(logits, work.labels[tokens], wanted)
    del logits
    if gradient is not None:
        grads.add(gradient, hidden, weight, tokens)
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
        for part, columns in parts:
            part.add_(columns.T @ right)
