"""Lion's update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class LionOptimizer(Optimizer):
    """Chen et al. 2023, algorithm 2: the sign of an average of moment and gradient, with decoupled
    weight decay. The moment has the parameter's dtype; an update needs one more such tensor."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; `closure` is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if "exp_avg" not in state:
                        state["exp_avg"] = torch.zeros_like(parameter)
                    _update(parameter, parameter.grad, state["exp_avg"], group)


def _update(parameter: Tensor, gradient: Tensor, moment: Tensor, group: dict[str, Any]) -> None:
    share, decay = group["betas"]
    direction = gradient.lerp(moment, share).sign_()
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.add_(direction, alpha=-group["lr"])
    moment.lerp_(gradient, 1 - decay)
