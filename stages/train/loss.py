"""The training loss: cross-entropy summed over target tokens, with all logits or in chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline import NO_TARGET, MicroBatch, StageError
from pipeline.utils import has_values
from stages.model.documents_compat import flash_documents
from stages.train.chunked_loss import chunked_cross_entropy
from stages.train.logits_loss import LossOfLogits, compiled_loss, loss_of_logits
from stages.train.router_loss import RouterLoss
from stages.train.vocabulary import sharded_cross_entropy

HINT = "leave out loss_chunk_size"


class SummedLoss:
    """Objective: cross-entropy in nats, summed over a batch's target tokens, computed in fp32.

    With `chunk`, the logits of `chunk` tokens are in memory at a time. No attention mask is passed:
    padding is on the right, fast causal attention stays available, and with a mask, or a cache,
    transformers would overlook where packed documents begin.

    The loss in chunks is compiled by the backend `compiled_by` of torch.compile, if that is named.
    With `chunk`, calls raise StageError for a model whose head is not a plain linear layer, or that
    changes its logits (caps or scales them).
    """

    def __init__(self, chunk: int | None = None, *, compiled_by: str | None = None) -> None:
        self._chunk = chunk
        self._of_logits = loss_of_logits if compiled_by is None else compiled_loss(compiled_by)
        self._heads: WeakKeyDictionary[nn.Module, LossHead] = WeakKeyDictionary()

    def __call__(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        return self.with_output(model, batch)[0]

    def with_output(
        self, model: nn.Module, batch: MicroBatch, **arguments: Any
    ) -> tuple[Tensor, Any]:
        """The loss, and what the model returned when it was called with `arguments` too."""
        if self._chunk is None:
            output = model_output(model, batch, **arguments)
            return _cross_entropy(output.logits, batch.labels), output
        if model not in self._heads:
            self._heads[model] = install(model, self._chunk, self._of_logits)
        head = self._heads[model]
        with head.computing_loss(batch.labels):
            output = model_output(model, batch, **arguments)
            head.require_unchanged(output.logits)
            return output.logits, output

    def in_full(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """The same loss with all logits at once."""
        return _cross_entropy(model_output(model, batch).logits, batch.labels)


class WithRouterLoss:
    """Objective: another one's cross-entropy, and the loss of a mixture of experts' router, whose
    `weight` is a number, or the model's own (`config`).

    It is a mean over the micro-batch's tokens, so it counts once for each of its target tokens.
    Calls raise StageError for a model without such a loss.
    """

    def __init__(self, plain: SummedLoss, weight: float | Literal["config"]) -> None:
        self._plain = plain
        self._weight: float | Literal["config"] = weight
        self._losses: WeakKeyDictionary[nn.Module, RouterLoss] = WeakKeyDictionary()

    def __call__(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        if model not in self._losses:
            self._losses[model] = RouterLoss(model, self._weight)
        summed, output = self._plain.with_output(model, batch, **RouterLoss.arguments)
        targets = (batch.labels != NO_TARGET).sum()
        return summed + self._losses[model](output, batch.real) * targets


def model_output(model: nn.Module, batch: MicroBatch, **arguments: Any) -> Any:
    """Return what the model gives for a micro-batch, called with `arguments` too."""
    places: dict[str, Any] = {}
    if batch.positions is not None:
        documents = flash_documents(model, batch.positions)
        places = {"position_ids": batch.positions, **documents}
    return model(input_ids=batch.input_ids, use_cache=False, **places, **arguments)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    flat, targets = logits.flatten(0, 1), labels.reshape(-1)
    if isinstance(flat, DTensor):
        return sharded_cross_entropy(flat, targets)
    return F.cross_entropy(flat.to(torch.float32), targets, ignore_index=NO_TARGET, reduction="sum")


class LossHead:
    """Replacement of the LM head's forward method. Inside of `computing_loss` it returns the summed
    loss as the model's logits. Hooks that a strategy has on the head (casts, gathered parameters)
    still run."""

    def __init__(
        self, head: nn.Linear, chunk: int, of_logits: LossOfLogits = loss_of_logits
    ) -> None:
        self._head = head
        self._forward = head.forward
        self._chunk = chunk
        self._of_logits = of_logits
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
        # Wrappers return another tensor with the same memory, or a copy. Comparing values waits for
        # the device, so only copies are compared; a trace has no values, and nothing copies there.
        real = has_values(output)
        if output is loss or (real and output.data_ptr() == loss.data_ptr()):
            return loss._version == self._version
        return real and bool(output.view(torch.int32) == loss.view(torch.int32))

    def __call__(self, hidden: Tensor) -> Tensor:
        if self._labels is None:
            return self._forward(hidden)
        flat, labels = hidden.reshape(-1, hidden.shape[-1]), self._labels.reshape(-1)
        head = self._head
        self._loss = chunked_cross_entropy(
            flat, head.weight, head.bias, labels, self._chunk, self._of_logits
        )
        self._version = self._loss._version
        return self._loss


def install(model: nn.Module, chunk: int, of_logits: LossOfLogits) -> LossHead:
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
    replaced = LossHead(head, chunk, of_logits)
    head.forward = replaced
    return replaced
