"""Planner of `average.ema`."""

from __future__ import annotations

import copy

from pipeline.engine import Engine
from pipeline.planning.planner import Planner
from pipeline.planning.strategy import StrategyMemory
from pipeline.planning.topology import Topology
from pipeline.stage import Context
from stages.average.ema import ELEMENT, EmaAverage


class EmaPlanner(Planner[EmaAverage]):
    """Planner of `average.ema`: an average of each weight beside the strategy's share."""

    def forecast(self, topology: Topology, strategy: StrategyMemory) -> StrategyMemory:
        averaged = copy.copy(strategy)
        averaged.averaged += ELEMENT
        return averaged

    def trace(self, ctx: Context, engine: Engine) -> Engine:
        return self.stage.run(ctx, engine)
