"""What planning asks of the stages that declare an optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipeline.artifacts import OptimizerPlan, Precision
from pipeline.planning.planner import NARROW_MASTERS, NARROW_MOMENTS, Planner, Saving
from pipeline.planning.shapes import BYTES, OptimizerShape, Taken
from pipeline.planning.topology import Topology
from pipeline.stage import Context
from stages.optimizer.adamw import AdamW, Kernel, Moments
from stages.optimizer.lion import Lion

BITS: dict[Moments, float] = {
    "fp32": 32.0, "bf16": 16.0, "fp8": 8 + 1 / 8, "8bit": 8 + 1 / 8, "4bit": 4 + 1 / 4,
}  # fmt: skip
"""Bits of one moment, with the scale of its block."""
TAKEN: dict[Kernel, Taken] = {"fused": "nothing", "foreach": "all", "single": "two"}
"""What torch's kernels take."""


class AdamWPlanner(Planner[AdamW]):
    """Of `optimizer.adamw`."""

    def forecast(self, topology: Topology, precision: Precision) -> OptimizerShape:
        stage = self.stage
        bits = BITS.get(stage.moments, 8.0 * BYTES[precision.master])
        plain = stage.algorithm == "adamw"
        return OptimizerShape(
            algorithm=stage.algorithm,
            bits=2 * bits,
            moments=2,
            taken=TAKEN[stage.kernel] if plain else "one",
            wide=not plain,
        )

    def savings(self, ranks: int) -> Iterator[Saving]:
        stage = self.stage
        if stage.moments == "master":
            yield Saving(
                order=NARROW_MOMENTS,
                what="moments in blocks of 8 bits",
                fields={"moments": "8bit"},
            )
        if not stage.stochastic_rounding:
            yield Saving(
                order=NARROW_MASTERS,
                what="master weights in bf16, updated with stochastic rounding",
                fields={"stochastic_rounding": True},
                beside={Precision: {"master": "bf16"}},
            )

    def trace(self, ctx: Context) -> OptimizerPlan:
        # What is compiled cannot be watched.
        plain = self.stage.algorithm == "adamw"
        return (self.stage if plain else replace(self.stage, kernel="single")).run(ctx)


class LionPlanner(Planner[Lion]):
    """Of `optimizer.lion`."""

    def forecast(self, topology: Topology, precision: Precision) -> OptimizerShape:
        bits = 8 * BYTES[precision.master]
        return OptimizerShape(algorithm=self.stage.algorithm, bits=bits, moments=1, taken="one")
