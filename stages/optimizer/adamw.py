"""AdamW."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from pipeline.artifacts import NamedParameter, OptimizerPlan
from pipeline.errors import Problem
from pipeline.stage import Context, PlanView
from stages.optimizer.schedule import Schedule, lr_scale

if TYPE_CHECKING:
    from torch.optim import Optimizer

Kernel = Literal["fused", "foreach", "single"]
Fraction = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Declare AdamW (Loshchilov & Hutter 2019, Decoupled Weight Decay Regularization), its schedule
    and gradient clipping."""

    lr: Annotated[float, Gt(0)] = 1e-5
    """Base (peak) learning rate."""

    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of the first and second moment."""

    eps: Annotated[float, Gt(0)] = 1e-8
    """Added to the root of the second moment."""

    weight_decay: Annotated[float, Ge(0)] = 0.01
    """Decoupled weight decay of matrices (parameters of two or more dimensions)."""

    decay_all: bool = False
    """Decay biases and normalisation weights too, instead of matrices only."""

    schedule: Schedule = "cosine"
    """How the learning rate moves after warm-up."""

    warmup_steps: Annotated[int, Ge(0)] = 0
    """Steps of linear warm-up. Excludes `warmup_ratio`."""

    warmup_ratio: Fraction = 0.0
    """Warm-up as a fraction of all steps, rounded up. Excludes `warmup_steps`."""

    final_lr_ratio: Annotated[float, Ge(0), Le(1)] = 0.0
    """Learning rate at the last step, as a fraction of `lr`; nothing to a constant schedule."""

    max_grad_norm: Annotated[float, Gt(0)] | None = 1.0
    """Clip the gradient of the whole model to this L2 norm; null does not clip."""

    kernel: Kernel = "fused"
    """torch implementation: fused (the fastest), foreach, or one tensor at a time."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        if self.warmup_steps and self.warmup_ratio:
            yield Problem(key="warmup_ratio", message="excludes warmup_steps", hint="give only one")

    def run(self, ctx: Context) -> OptimizerPlan:
        hyperparameters = {
            "lr": self.lr,
            "betas": tuple(self.betas),
            "eps": self.eps,
            "weight_decay": self.weight_decay,
        }
        return OptimizerPlan(
            algorithm="adamw",
            hyperparameters=hyperparameters,
            groups=functools.partial(
                decay_groups, weight_decay=self.weight_decay, decay_all=self.decay_all
            ),
            moments=("exp_avg", "exp_avg_sq"),
            build=functools.partial(_build, hyperparameters=hyperparameters, kernel=self.kernel),
            lr_scale=self._lr_scale,
            max_grad_norm=self.max_grad_norm,
        )

    def _lr_scale(self, step: int, total: int) -> float:
        # 0.07 x 100 is a little more than 7 in binary.
        warmup = self.warmup_steps or math.ceil(round(self.warmup_ratio * total, 9))
        return lr_scale(
            step, total, schedule=self.schedule, warmup=warmup, final_scale=self.final_lr_ratio
        )


def decay_groups(
    parameters: Iterable[NamedParameter], *, weight_decay: float, decay_all: bool
) -> list[dict[str, Any]]:
    """Trainable parameters in at most two groups: decayed (two or more dimensions) and not."""
    decayed: dict[str, Any] = {"params": [], "weight_decay": weight_decay}
    kept: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    for _, parameter, shape in parameters:
        if parameter.requires_grad:
            group = decayed if decay_all or len(shape) >= 2 else kept
            group["params"].append(parameter)
    return [group for group in (decayed, kept) if group["params"]]


def _build(
    groups: list[dict[str, Any]], *, hyperparameters: dict[str, Any], kernel: Kernel
) -> Optimizer:
    import torch

    return torch.optim.AdamW(
        groups, **hyperparameters, fused=kernel == "fused", foreach=kernel == "foreach"
    )
