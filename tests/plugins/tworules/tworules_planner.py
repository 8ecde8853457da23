"""The planner of TwoRules."""

from __future__ import annotations

from pipeline import Precision
from pipeline.planning import BYTES, ModelShape, OptimizerShape, Planner, Topology
from tests.plugins.tworules.tworules import TwoRules


class TwoRulesPlanner(Planner[TwoRules]):
    """Counts the moments of both rules, and says what is left out."""

    def forecast(
        self, topology: Topology, model: ModelShape, precision: Precision
    ) -> tuple[OptimizerShape, str]:
        matrices = sum(
            weight.all_elements
            for kind in model.blocks
            for weight in model.kinds[kind]
            if weight.trained and len(weight.shape) > 1
        )
        moments = 2 - matrices / model.trained  # one of a matrix, two of anything else
        bits = 8 * BYTES[precision.master] * moments
        shape = OptimizerShape(algorithm="orthogonal+adamw", moments=moments, bits=bits)
        return shape, "the exchange and the arithmetic of whole matrices"
