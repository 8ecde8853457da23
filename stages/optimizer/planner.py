"""Planners of the optimizer stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pipeline import Precision, planning
from pipeline.planning import BYTES, OptimizerShape, Planner, Saving, Topology
from stages.optimizer.adamw import AdamW, Moments

if TYPE_CHECKING:
    from stages.optimizer.lion import Lion

SINGLE = 2
"""Temporary copies of a parameter in torch's kernel `single`; `fused` makes none."""
LOW_BIT: dict[Moments, tuple[float, float, float]] = {
    "master": (0, 0, 24),
    "fp32": (32, 0, 24),
    "bf16": (16, 0, 24),
    "8bit": (8 + 1 / 8, 8, 49),
}
"""Bits of one moment with its block's scale (0: those of a weight). Temporary bytes of an update
for each element of a parameter, if torch's kernels do not compute it: compiled (buffers of the code
that torch 2.13 generates for CPUs, counted by a test), and not compiled, as traced."""
ROUNDING = (4, 12)
"""Further temporary bytes for each element with stochastic rounding, likewise."""


class AdamWPlanner(Planner[AdamW]):
    """Planner of `optimizer.adamw`."""

    def forecast(self, topology: Topology, precision: Precision) -> OptimizerShape:
        stage, master = self.stage, BYTES[precision.master]
        bits, *low_bit = LOW_BIT[stage.moments]
        eager = stage.kernel != "fused"
        taken = low_bit[eager] + ROUNDING[eager] * stage.stochastic_rounding
        return OptimizerShape(
            algorithm=stage.algorithm,
            bits=2 * (bits or 8 * master),
            moments=2,
            taken=master * SINGLE * eager if stage.algorithm == "adamw" else taken,
        )

    def savings(self, ranks: int) -> Iterator[Saving]:
        stage = self.stage
        if stage.moments == "master":
            what = "moments in blocks of 8 bits"
            yield Saving(order=planning.NARROW_MOMENTS, what=what, fields={"moments": "8bit"})
        if not stage.stochastic_rounding:
            # Moments in bf16, like the masters, would lose their own small changes.
            moments = "8bit" if stage.moments == "master" else stage.moments
            yield Saving(
                order=planning.NARROW_MASTERS,
                what="bf16 masters with stochastic rounding, moments in blocks of 8 bits",
                fields={"moments": moments, "stochastic_rounding": True},
                beside={Precision: {"master": "bf16"}},
            )


class LionPlanner(Planner[Any]):
    """Planner of `optimizer.lion`."""

    stage: Lion

    def forecast(self, topology: Topology, precision: Precision) -> OptimizerShape:
        bits = 8 * BYTES[precision.master]
        return OptimizerShape(algorithm=self.stage.algorithm, bits=bits, moments=1, taken=bits / 8)
