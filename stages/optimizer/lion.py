"""Lion."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt

from pipeline import Context, OptimizerPlan
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
        rule: dict[str, Any] = {
            "lr": self.lr,
            "betas": tuple(self.betas),
            "weight_decay": self.weight_decay,
        }
        return self.plan(
            algorithm=self.algorithm,
            hyperparameters=rule,
            moments=("exp_avg",),
            counts_updates=False,
            build=functools.partial(_build, **rule),
        )


def _build(groups: list[dict[str, Any]], **rule: Any) -> Optimizer:
    from stages.optimizer.update_rules import LionOptimizer

    return LionOptimizer(groups, **rule)
