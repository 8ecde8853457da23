"""The training loss: cross-entropy summed over target tokens, with all logits or in chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline import NO_TARGET, MicroBatch, StageError
from pipeline.utils import has_values
from stages.train.chunked_loss import chunked_cross_entropy
from stages.train.vocabulary import sharded_cross_entropy

HINT = "leave out loss_chunk_size"


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
        logits, labels = _logits(model, batch).flatten(0, 1), batch.labels.reshape(-1)
        if isinstance(logits, DTensor):
            return sharded_cross_entropy(logits, labels)
        return F.cross_entropy(
            logits.to(torch.float32), labels, ignore_index=NO_TARGET, reduction="sum"
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
