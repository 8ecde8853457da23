"""The LM head of a model, replaced by one that computes scores instead of logits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipeline import StageError
from pipeline.utils import has_values

HINT = "leave out loss_chunk_size"


class ReplacedHead:
    """Replacement of the LM head's forward method. Inside of `computing` it returns what a function
    makes of the hidden states as the model's logits. Hooks that a strategy has on the head (casts,
    gathered parameters) still run."""

    def __init__(self, head: nn.Linear) -> None:
        self._head = head
        self._forward = head.forward
        self._function: Callable[[Tensor, nn.Linear], Tensor] | None = None
        self._scores: Tensor | None = None
        self._version = 0

    @classmethod
    def of(cls, model: nn.Module) -> ReplacedHead:
        """The replaced head of `model`, wrapped or not. Raises StageError for a head that is not a
        plain linear layer."""
        modules = (m for m in model.modules() if hasattr(m, "get_output_embeddings"))
        transformer: Any = next(modules, None)
        if transformer is None:
            raise StageError("loss_chunk_size: the model does not say what its head is")
        head = transformer.get_output_embeddings()
        if type(head).forward is not nn.Linear.forward:
            raise StageError(
                f"loss_chunk_size: the model's head is a {type(head).__name__}, no plain linear "
                "layer",
                hint=HINT,
            )
        if not isinstance(head.forward, cls):
            head.forward = cls(head)
        found: ReplacedHead = head.forward
        return found

    @contextlib.contextmanager
    def computing(self, function: Callable[[Tensor, nn.Linear], Tensor]) -> Iterator[None]:
        """Make forward passes return `function(hidden, head)`."""
        self._function = function
        try:
            yield
        finally:
            self._function = self._scores = None

    def require_unchanged(self, output: Tensor) -> None:
        """Raise StageError unless the model's `output` is what this head returned."""
        if not self._is_own(output):
            raise StageError(
                "loss_chunk_size: this model computes something with its logits (caps or scales "
                "them, say), so their loss cannot stand for them",
                hint=HINT,
            )

    def _is_own(self, output: Tensor) -> bool:
        own = self._scores
        if own is None or (output.shape, output.dtype) != (own.shape, own.dtype):
            return False
        # Wrappers return another tensor with the same memory, or a copy. Comparing values waits for
        # the device, so only copies are compared; a trace has no values, and nothing copies there.
        real = has_values(output)
        if output is own or (real and output.data_ptr() == own.data_ptr()):
            return own._version == self._version
        return real and torch.equal(output.view(torch.int32), own.view(torch.int32))

    def __call__(self, hidden: Tensor) -> Tensor:
        if self._function is None:
            return self._forward(hidden)
        self._scores = self._function(hidden, self._head)
        self._version = self._scores._version
        return self._scores
