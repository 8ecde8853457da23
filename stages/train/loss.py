"""The training loss: a sum over target tokens, to be normalised over the whole optimizer step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.contracts.data import NO_TARGET
from pipeline.errors import StageError
from pipeline.utils.fake_tensors import has_values
from stages.train.batches import MicroBatch
from stages.train.linear_loss import linear_loss
from stages.train.policies import CHANGED_LOGITS, HINT


class SummedLoss:
    """Cross-entropy in nats, summed over a batch's target tokens, computed in fp32; a scalar.

    With `chunk`, logits of so many tokens are in memory at a time. No attention mask is passed:
    padding is on the right, fast causal attention stays available, and with a mask, or a cache,
    transformers would overlook where packed documents begin.

    Calls raise StageError where chunks are of no use: for a model that computes something with its
    logits.
    """

    def __init__(self, model: nn.Module, chunk: int | None = None) -> None:
        self._model = model
        self._head: LossHead | None = None if chunk is None else install(model, chunk)

    def __call__(self, batch: MicroBatch) -> Tensor:
        if self._head is None:
            return self.in_full(batch)
        with self._head.taking(batch.labels):
            loss = self._logits(batch)
            self._head.require_given(loss)
            return loss

    def in_full(self, batch: MicroBatch) -> Tensor:
        """The same with all logits at once."""
        logits = self._logits(batch)
        return F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).to(torch.float32),
            batch.labels.reshape(-1),
            ignore_index=NO_TARGET,
            reduction="sum",
        )

    def _logits(self, batch: MicroBatch) -> Tensor:
        places = {} if batch.positions is None else {"position_ids": batch.positions}
        output: Any = self._model(input_ids=batch.input_ids, use_cache=False, **places)
        logits: Tensor = output.logits
        return logits


class LossHead:
    """In place of the head's forward method: while it has labels, it gives their summed loss as the
    model's logits. It is called like the head itself, so what a strategy hooks onto the head
    (casts, gathered parameters) is in place."""

    def __init__(self, head: nn.Linear, chunk: int) -> None:
        self._head = head
        self._forward = head.forward
        self._chunk = chunk
        self._labels: Tensor | None = None
        self._given: Tensor | None = None
        self._version = 0

    @contextlib.contextmanager
    def taking(self, labels: Tensor) -> Iterator[None]:
        """Forward passes inside give the loss on `labels`, shape (samples, length)."""
        self._labels = labels
        try:
            yield
        finally:
            self._labels = self._given = None

    def require_given(self, output: Tensor) -> None:
        """`output`, what the model returns as logits, is the loss that this head gave, and nothing
        was computed with it. Inside of `taking`; raises StageError."""
        if not self._gave(output):
            raise StageError(
                CHANGED_LOGITS,
                hint=HINT,
            )

    def _gave(self, output: Tensor) -> bool:
        given = self._given
        if given is None or (output.shape, output.dtype) != (given.shape, given.dtype):
            return False
        # Wrappers hand on another tensor with the same memory (ZeRO-3), or a copy (DDP with a
        # static graph). Comparing values waits for the device, so it is for copies alone; in a
        # trace, where there are none, nothing makes copies.
        real = has_values(output)
        if output is given or (real and output.data_ptr() == given.data_ptr()):
            return given._version == self._version
        return real and bool(output.view(torch.int32) == given.view(torch.int32))

    def __call__(self, hidden: Tensor) -> Tensor:
        if self._labels is None:
            return self._forward(hidden)
        flat = hidden.reshape(-1, hidden.shape[-1])
        head = self._head
        labels = self._labels.reshape(-1)
        self._given = linear_loss(flat, head.weight, head.bias, labels, self._chunk)
        self._version = self._given._version
        return self._given


def install(model: nn.Module, chunk: int) -> LossHead:
    """Replace the head of `model`, wrapped or not, by one that computes `chunk` tokens at a time.

    Raises StageError for a head that is no plain linear layer.
    """
    head = _head(model)
    if type(head).forward is not nn.Linear.forward:
        raise StageError(
            f"loss_chunk_size: the model's head is a {type(head).__name__}, no plain linear layer",
            hint=HINT,
        )
    replaced = LossHead(head, chunk)
    head.forward = replaced
    return replaced


def _head(model: nn.Module) -> Any:
    """The output layer of the transformers model inside of `model`."""
    for module in model.modules():
        find: Any = getattr(module, "get_output_embeddings", None)
        if find is not None:
            return find()
    raise StageError("loss_chunk_size: the model does not say what its head is")
