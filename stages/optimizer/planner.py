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
COMPILED: dict[Moments, float] = {"8bit": 8.0, "4bit": 24.1}
"""Bytes for each element of a parameter that a compiled update takes where it does not do without:
buffers of the code that torch 2.13 makes of it for CPUs, which a test counts."""
UNCOMPILED: dict[Moments, float] = {
    "master": 24, "fp32": 24, "bf16": 24, "fp8": 32, "8bit": 49, "4bit": 49,
}  # fmt: skip
"""The same of one that is not compiled, as traced; WIDE more with stochastic rounding."""
WIDE = 8
NOISE = 4
"""Bytes of an element's random bits."""


class AdamWPlanner(Planner[AdamW]):
    """Planner of `optimizer.adamw`."""

    def forecast(self, topology: Topology, precision: Precision) -> OptimizerShape:
        stage = self.stage
        bits = BITS.get(stage.moments, 8.0 * BYTES[precision.master])
        taken = self._taken()
        if stage.algorithm == "adamw":
            taken = BYTES[precision.master] * TORCH[stage.kernel]
        return OptimizerShape(
            algorithm=stage.algorithm,
            bits=2 * bits,
            moments=2,
            taken=taken + NOISE * stage.stochastic_rounding,
            at_once=stage.kernel == "foreach",
        )

    def _taken(self) -> float:
        stage = self.stage
        if stage.kernel == "fused":
            return COMPILED.get(stage.moments, 0.0)
        return UNCOMPILED[stage.moments] + WIDE * stage.stochastic_rounding

    def savings(self, ranks: int) -> Iterator[Saving]:
        stage = self.stage
        if stage.moments == "master":
            yield Saving(
                order=NARROW_MOMENTS,
                what="moments in blocks of 8 bits",
                fields={"moments": "8bit"},
            )
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
        # What is compiled cannot be watched.
        build = functools.partial(_taking, build=plan.build, size=self._taken())
        return replace(plan, build=build)


def _taking(groups: list[dict[str, Any]], *, build: Callable[..., Any], size: float) -> Any:
    """An optimizer whose updates take so many bytes for each element, and change nothing."""
    import torch

    def update(weights: torch.Tensor, *given: Any, **more: Any) -> None:
        torch.empty(round(size * weights.numel()), dtype=torch.uint8, device=weights.device)

    optimizer = build(groups)
    optimizer.compiled = update
    return optimizer


class LionPlanner(Planner[Lion]):
    """Planner of `optimizer.lion`."""

    def forecast(self, topology: Topology, precision: Precision) -> OptimizerShape:
        bits = 8 * BYTES[precision.master]
        return OptimizerShape(algorithm=self.stage.algorithm, bits=bits, moments=1, taken=bits / 8)
