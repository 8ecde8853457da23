"""Have a model's head give the loss instead of logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import StageError
from pipeline.fake_tensors import has_values
from stages.train.linear_loss import linear_loss
from stages.train.refusals import CHANGED_LOGITS, HINT


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
