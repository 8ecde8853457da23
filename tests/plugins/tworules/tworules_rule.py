"""The update rule of TwoRules for matrices. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pipeline import WholeMatrices

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Orthogonal(torch.optim.Optimizer):
    """The nearest orthogonal matrix of the momentum, with decoupled weight decay: `lr`,
    `weight_decay`, `momentum`."""

    def __init__(self, groups: Iterable[dict[str, Any]], whole: WholeMatrices, **rule: Any) -> None:
        super().__init__(groups, rule)
        self._whole = whole

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; `closure` is not called."""
        trained = {
            parameter: group
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        }

        def direction(parameter: nn.Parameter) -> Tensor:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffer: Tensor = state["momentum_buffer"]
            return buffer.mul_(trained[parameter]["momentum"]).add_(parameter.grad)

        for parameter, update in self._whole(trained, direction, orthogonalised):
            group = trained[parameter]
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-group["lr"])


def orthogonalised(matrix: Tensor) -> Tensor:
    """Singular values near 1, in five steps of a Newton-Schulz iteration in fp32."""
    value = matrix.float() / (matrix.float().norm() + 1e-7)
    if value.ndim < 2:
        return value
    tall = value.size(0) > value.size(1)
    value = value.mT if tall else value
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        square = value @ value.mT
        value = a * value + (b * square + c * square @ square) @ value
    return value.mT if tall else value
