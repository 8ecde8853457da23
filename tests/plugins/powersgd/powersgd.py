"""DDP whose gradients are averaged in low rank (Vogels et al. 2019, PowerSGD)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from pipeline import Context, Engine, ModelSource, OptimizerPlan, Precision


@dataclass(frozen=True, kw_only=True)
class PowerSgd:
    """Replicate the model and average low-rank approximations of its gradients."""

    rank: Annotated[int, Field(gt=0)] = 1
    """Rank of the approximation of each gradient matrix. Matrices that would not become smaller are
    averaged exactly."""

    def run(
        self, ctx: Context, model: ModelSource, precision: Precision, optimizer: OptimizerPlan
    ) -> Engine:
        from tests.plugins.powersgd.powersgd_engine import build

        return build(self, ctx, model, precision, optimizer)
