"""The training loss: cross-entropy summed over target tokens, with all logits or in chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline import NO_TARGET, MicroBatch, StageError
from pipeline.utils import has_values

HINT = "leave out loss_chunk_size"
PIECE = 1 << 26
"""Elements of a product that are computed at a time to be added in another dtype."""


class SummedLoss:
    """Objective: cross-entropy in nats, summed over a batch's target tokens, computed in fp32.

    With `chunk`, the logits of `chunk` tokens are in memory at a time. No attention mask is passed:
    padding is on the right, fast causal attention stays available, and with a mask, or a cache,
    transformers would overlook where packed documents begin.

    With `chunk`, calls raise StageError for a model whose head is not a plain linear layer, or that
    changes its logits (caps or scales them).
    """

    def __init__(self, chunk: int | None = None) -> None:
        self._chunk = chunk
        self._heads: WeakKeyDictionary[nn.Module, LossHead] = WeakKeyDictionary()

    def __call__(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        if self._chunk is None:
            return self.in_full(model, batch)
        if model not in self._heads:
            self._heads[model] = install(model, self._chunk)
        head = self._heads[model]
        with head.computing_loss(batch.labels):
            loss = _logits(model, batch)
            head.require_unchanged(loss)
            return loss

    def in_full(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """The same loss with all logits at once."""
        logits = _logits(model, batch)
        return F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).to(torch.float32),
            batch.labels.reshape(-1),
            ignore_index=NO_TARGET,
            reduction="sum",
        )


def _logits(model: nn.Module, batch: MicroBatch) -> Tensor:
    places = {} if batch.positions is None else {"position_ids": batch.positions}
    output: Any = model(input_ids=batch.input_ids, use_cache=False, **places)
    logits: Tensor = output.logits
    return logits


class LossHead:
    """Replacement of the LM head's forward method. Inside of `computing_loss` it returns the summed
    loss as the model's logits. Hooks that a strategy has on the head (casts, gathered parameters)
    still run."""

    def __init__(self, head: nn.Linear, chunk: int) -> None:
        self._head = head
        self._forward = head.forward
        self._chunk = chunk
        self._labels: Tensor | None = None
        self._loss: Tensor | None = None
        self._version = 0

    @contextlib.contextmanager
    def computing_loss(self, labels: Tensor) -> Iterator[None]:
        """Make forward passes return the loss on `labels`, shape (samples, length)."""
        self._labels = labels
        try:
            yield
        finally:
            self._labels = self._loss = None

    def require_unchanged(self, output: Tensor) -> None:
        """Raise StageError unless the model's `output` is the loss that this head computed."""
        if not self._is_loss(output):
            raise StageError(
                "loss_chunk_size: this model computes something with its logits (caps or scales "
                "them, say), so their loss cannot stand for them",
                hint=HINT,
            )

    def _is_loss(self, output: Tensor) -> bool:
        loss = self._loss
        if loss is None or (output.shape, output.dtype) != (loss.shape, loss.dtype):
            return False
        # Wrappers return another tensor with the same memory (ZeRO-3), or a copy (DDP with a static
        # graph). Comparing values waits for the device, so only copies are compared; a trace has
        # no values, and nothing copies there.
        real = has_values(output)
        if output is loss or (real and output.data_ptr() == loss.data_ptr()):
            return loss._version == self._version
        return real and bool(output.view(torch.int32) == loss.view(torch.int32))

    def __call__(self, hidden: Tensor) -> Tensor:
        if self._labels is None:
            return self._forward(hidden)
        flat, labels = hidden.reshape(-1, hidden.shape[-1]), self._labels.reshape(-1)
        head = self._head
        self._loss = chunked_cross_entropy(flat, head.weight, head.bias, labels, self._chunk)
        self._version = self._loss._version
        return self._loss


def install(model: nn.Module, chunk: int) -> LossHead:
    """Replace the LM head of `model`, wrapped or not, by one that computes `chunk` tokens at a
    time. Raises StageError for a head that is not a plain linear layer."""
    modules = (m for m in model.modules() if hasattr(m, "get_output_embeddings"))
    transformer: Any = next(modules, None)
    if transformer is None:
        raise StageError("loss_chunk_size: the model does not say what its head is")
    head = transformer.get_output_embeddings()
    if type(head).forward is not nn.Linear.forward:
        raise StageError(
            f"loss_chunk_size: the model's head is a {type(head).__name__}, no plain linear layer",
            hint=HINT,
        )
    replaced = LossHead(head, chunk)
    head.forward = replaced
    return replaced


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
    """
    if not torch.is_grad_enabled():  # a Function does not see this
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    summed: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, bias, labels, chunk)  # type: ignore[no-untyped-call]
    return summed


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: int
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
            total += _chunk(hidden, weight, bias, labels, slice(start, start + chunk), grads)
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
        return *scaled, None, None


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
) -> Tensor:
    """Add the gradients of the tokens `rows`; returns their summed loss."""
    logits = F.linear(hidden[rows], weight, bias).float()
    loss = F.cross_entropy(logits, labels[rows], ignore_index=NO_TARGET, reduction="sum")
    if grads == (None, None, None):
        return loss
    grad = _logits_gradient(logits, labels[rows])
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
