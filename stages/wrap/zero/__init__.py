"""The stage `wrap.zero`: ZeRO by DeepSpeed. Importing this imports neither torch nor deepspeed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline import Context, Engine, ModelSource, OptimizerPlan, PlanView, Precision, Problem
from stages.wrap.axes import OnAxes
from stages.wrap.axis_checks import axis_problems
from stages.wrap.zero.config import problems
from stages.wrap.zero.fields import (
    Aio,
    OptimizerOffload,
    ParameterOffload,
    PlusPlus,
    ZeroFields,
)

__all__ = ["Aio", "OptimizerOffload", "ParameterOffload", "PlusPlus", "Zero"]


@dataclass(frozen=True, kw_only=True)
class Zero(ZeroFields, OnAxes):
    """Shard training state across ranks with DeepSpeed ZeRO (Rajbhandari et al. 2020), optionally
    offloaded to host memory or NVMe (Rajbhandari et al. 2021, ZeRO-Infinity).

    Fields left at null take DeepSpeed's default. The generated configuration is written to
    `deepspeed.json` in the run folder.
    """

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from axis_problems(self, plan)
        yield from problems(self, plan)

    def run(
        self, ctx: Context, model: ModelSource, precision: Precision, optimizer: OptimizerPlan
    ) -> Engine:
        from stages.wrap.zero.engine import build

        return build(self, ctx, model, precision, optimizer)
