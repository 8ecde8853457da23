"""Planners of the stages that declare an optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pipeline.artifacts import OptimizerPlan, Precision
from pipeline.planning.planner import NARROW_MASTERS, NARROW_MOMENTS, Planner, Saving
from pipeline.planning.shapes import BYTES, OptimizerShape
from pipeline.planning.topology import Topology
from pipeline.stage import Context
from stages.optimizer.adamw import AdamW, Kernel, Moments
from stages.optimizer.lion import Lion

BITS: dict[Moments, float] = {
    "fp32": 32.0, "bf16": 16.0, "fp8": 8 + 1 / 8, "8bit": 8 + 1 / 8, "4bit": 4 + 1 / 4,
}  # fmt: skip
"""Bits of one moment, with the scale of its block."""
TORCH: dict[Kernel, int] = {"fused": 0, "foreach": 1, "single": 2}
"""Copies of a parameter that torch's kernels take, foreach of all at once."""
TAKEN: dict[Moments, tuple[float, float]] = {
    "master": (0, 24), "fp32": (0, 24), "bf16": (0, 24), "fp8": (0, 32), "8bit": (8, 49),
    "4bit": (24.1, 49),
}  # fmt: skip
"""Bytes for each element of a parameter that an update takes where torch's kernels do not do:
compiled (buffers of the code that torch 2.13 makes of it for CPUs, which a test counts), and not
compiled, as traced."""
ROUNDING = (4, 12)
"""The same that stochastic rounding takes besides."""


class AdamWPlanner(Planner[AdamW]):
    """Planner of `optimizer.adamw`."""

    def forecast(self, topology: Topology, precision: Precision) -> OptimizerShape:
        stage, master = self.stage, BYTES[precision.master]
        eager = stage.kernel != "fused"
        taken = TAKEN[stage.moments][eager] + ROUNDING[eager] * stage.stochastic_rounding
        if stage.algorithm == "adamw":
            taken = master * TORCH[stage.kernel]
        return OptimizerShape(
            algorithm=stage.algorithm,
            bits=2 * BITS.get(stage.moments, 8.0 * master),
            moments=2,
            taken=taken,
            at_once=stage.kernel == "foreach",
        )

    def savings(self, ranks: int) -> Iterator[Saving]:
        stage = self.stage
        if stage.moments == "master":
            what = "moments in blocks of 8 bits"
            yield Saving(order=NARROW_MOMENTS, what=what, fields={"moments": "8bit"})
        if not stage.stochastic_rounding:
            # Moments that followed masters into bf16 would lose small changes of theirs.
            moments = "8bit" if stage.moments == "master" else stage.moments
            yield Saving(
                order=NARROW_MASTERS,
                what="bf16 masters with stochastic rounding, moments in blocks of 8 bits",
                fields={"moments": moments, "stochastic_rounding": True},
                beside={Precision: {"master": "bf16"}},
            )

    def trace(self, ctx: Context) -> OptimizerPlan:
        plan = self.stage.run(ctx)
        if self.stage.algorithm == "adamw" or self.stage.kernel != "fused":
            return plan
        return replace(plan, build=functools.partial(_idle, plan.build))


def _idle(build: Callable[..., Any], groups: list[dict[str, Any]]) -> Any:
    """An optimizer whose compiled updates, which cannot be watched, change and take nothing."""
    optimizer = build(groups)
    optimizer.compiled = lambda *given, **named: None
    return optimizer


class LionPlanner(Planner[Lion]):
    """Planner of `optimizer.lion`."""

    def forecast(self, topology: Topology, precision: Precision) -> OptimizerShape:
        bits = 8 * BYTES[precision.master]
        return OptimizerShape(algorithm=self.stage.algorithm, bits=bits, moments=1, taken=bits / 8)
