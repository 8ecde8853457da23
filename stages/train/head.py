"""Have a model's head give the loss instead of logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from pipeline.errors import StageError
from stages.train.linear_loss import linear_loss


class LossHead:
    """In place of the head's forward method: while it has labels, it gives their summed loss as the
    model's logits. It is called like the head itself, so what a strategy hooks onto the head
    (casts, gathered parameters) is in place."""

    def __init__(self, head: nn.Linear, chunk: int) -> None:
        self._head = head
        self._forward = head.forward
        self._chunk = chunk
        self._labels: Tensor | None = None

    @contextlib.contextmanager
    def taking(self, labels: Tensor) -> Iterator[None]:
        """Forward passes inside give the loss on `labels`, shape (samples, length)."""
        self._labels = labels
        try:
            yield
        finally:
            self._labels = None

    def __call__(self, hidden: Tensor) -> Tensor:
        if self._labels is None:
            return self._forward(hidden)
        flat = hidden.reshape(-1, hidden.shape[-1])
        head = self._head
        return linear_loss(flat, head.weight, head.bias, self._labels.reshape(-1), self._chunk)


def install(model: nn.Module, chunk: int) -> LossHead:
    """Replace the head of `model`, wrapped or not, by one that computes `chunk` tokens at a time.

    Raises StageError for a head that is no plain linear layer.
    """
    head = _head(model)
    if type(head).forward is not nn.Linear.forward:
        raise StageError(
            f"loss_chunk_size: the model's head is a {type(head).__name__}, no plain linear layer",
            hint="leave out loss_chunk_size",
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
