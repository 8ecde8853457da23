"""Lion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from pipeline import Context, OptimizerPlan
from stages.optimizer.settings import Fraction, OptimizerSettings


@dataclass(frozen=True, kw_only=True)
class Lion(OptimizerSettings):
    """Declare Lion (Chen et al. 2023, Symbolic Discovery of Optimization Algorithms), its schedule
    and gradient clipping. It keeps one moment where AdamW keeps two, and wants about a tenth of
    AdamW's learning rate and ten times its weight decay."""

    lr: Annotated[float, Gt(0)] = 1e-6
    """Base (peak) learning rate."""

    betas: tuple[Fraction, Fraction] = (0.9, 0.99)
    """Share of the moment in the update, and decay rate of the moment."""

    def run(self, ctx: Context) -> OptimizerPlan:
        from stages.optimizer.update_rules import LionOptimizer

        return self.plan(
            LionOptimizer, moments=("exp_avg",), counts_updates=False, betas=tuple(self.betas)
        )
