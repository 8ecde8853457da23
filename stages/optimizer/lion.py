"""Lion."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt

from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.contracts.stage import Context
from stages.optimizer.settings import Fraction, OptimizerSettings

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class Lion(OptimizerSettings):
    """Declare Lion (Chen et al. 2023, Symbolic Discovery of Optimization Algorithms), its schedule
    and gradient clipping. It keeps one moment where AdamW keeps two, and wants about a tenth of
    AdamW's learning rate and ten times its weight decay."""

    lr: Annotated[float, Gt(0)] = 1e-6
    """Base (peak) learning rate."""

    betas: tuple[Fraction, Fraction] = (0.9, 0.99)
    """Share of the moment in the update, and decay rate of the moment."""

    @property
    def algorithm(self) -> str:
        """Name of the update rule."""
        return "lion"

    def run(self, ctx: Context) -> OptimizerPlan:
        hyperparameters = {
            "lr": self.lr,
            "betas": tuple(self.betas),
            "weight_decay": self.weight_decay,
        }
        return OptimizerPlan(
            algorithm=self.algorithm,
            hyperparameters=hyperparameters,
            groups=self.make_groups(),
            moments=("exp_avg",),
            counts_updates=False,
            build=functools.partial(_build, hyperparameters=hyperparameters),
            lr_scale=self.lr_scale,
            schedule_warnings=self.schedule_warnings,
            max_grad_norm=self.max_grad_norm,
        )


def _build(groups: list[dict[str, Any]], *, hyperparameters: dict[str, Any]) -> Optimizer:
    from stages.optimizer.lion_rule import LionOptimizer

    return LionOptimizer(groups, **hyperparameters)
