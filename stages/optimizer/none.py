"""No optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline import Context, OptimizerPlan, UpdateRule


@dataclass(frozen=True, kw_only=True)
class NoOptimizer:
    """Declare that the model of the next wrap slot is not trained: it is held in the compute dtype,
    without gradients and optimizer state, to score samples."""

    def update_rules(self) -> Sequence[UpdateRule]:
        return ()

    def run(self, ctx: Context) -> OptimizerPlan:
        return OptimizerPlan(parts=(), max_grad_norm=None)
