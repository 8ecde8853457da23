"""The planner of TwoRules."""

from __future__ import annotations

from pipeline import Precision
from pipeline.planning import BYTES, ModelShape, OptimizerShape, Planner, Topology
from tests.plugins.tworules.tworules import ADAMW, ORTHOGONAL, TwoRules


class TwoRulesPlanner(Planner[TwoRules]):
    """Counts the moments of both rules."""

    def forecast(
        self, topology: Topology, model: ModelShape, precision: Precision
    ) -> tuple[OptimizerShape, str]:
        bits = 8 * BYTES[precision.master]
        one = OptimizerShape(algorithm=ORTHOGONAL.algorithm, moments=1, bits=bits)
        two = OptimizerShape(algorithm=ADAMW.algorithm, moments=2, bits=2 * bits)
        matrices = {weight.name for kind in model.kinds for weight in kind if len(weight.shape) > 1}
        shape = OptimizerShape.of_parts(
            model, [(lambda one: one.name in matrices, one), (lambda other: True, two)]
        )
        return shape, "the exchange and the arithmetic of whole matrices"
