"""The loss by which a mixture of experts keeps its router balanced, as its architecture has it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from pipeline import StageError

FUNCTION = "load_balancing_loss_func"
"""Name of the loss in each of transformers' model files that have one."""
SIZES = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
"""Attributes of a model that its own forward pass computes the loss with."""


class RouterLoss:
    """The weighted router loss of a batch, from what the model returned for it; a scalar.

    It is a mean over the batch's tokens (Fedus et al. 2022, eq. 4 to 6), so a batch's part of a
    step's loss is its router loss times its share of the step's targets. With one batch in a step,
    that and the mean cross-entropy make the `loss` of transformers' own forward pass.
    """

    arguments: ClassVar = {"output_router_logits": True}
    """Arguments with which the model returns what the loss is computed from."""

    def __init__(self, model: nn.Module, weight: float | Literal["config"]) -> None:
        """Raises StageError for a model, wrapped or not, without such a loss."""
        transformer: Any = next((m for m in model.modules() if _loss_of(m)), None)
        if transformer is None:
            raise StageError(
                "router_loss: the model's architecture has no loss of its router",
                hint="leave out router_loss",
            )
        self._loss = _loss_of(transformer)
        self._experts = int(transformer.num_experts)
        self._picks = int(transformer.num_experts_per_tok)
        own = float(transformer.router_aux_loss_coef)
        self.weight = own if weight == "config" else weight

    def __call__(self, output: Any, real: Tensor | None = None) -> Tensor:
        """The weighted loss of `output`; `real`, shape (samples, length), is False for padding,
        which is left out. A batch that is only padding is not left out."""
        assert self._loss is not None
        mask = None if real is None else real | ~real.any()
        loss: Tensor = self._loss(output.router_logits, self._experts, self._picks, mask)
        return self.weight * loss.float()


def _loss_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """The router loss in the file of the module's class, if the module has what it takes.
    Strategies put their own classes on top."""
    if not all(hasattr(module, name) for name in SIZES):
        return None
    files = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
    return next((getattr(file, FUNCTION) for file in files if hasattr(file, FUNCTION)), None)
