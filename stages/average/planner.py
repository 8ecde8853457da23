"""What planning asks of `average.ema`."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.engine import Engine
from pipeline.planning.planner import Planner
from pipeline.planning.strategy import Copies, Gradients, Item, Moment, StrategyMemory, Traffic
from pipeline.planning.timeline import Place
from pipeline.planning.topology import Topology
from pipeline.stage import Context
from stages.average.ema import EmaAverage

AVERAGE = "average of weights"
ELEMENT = 4
"""Bytes of it, in fp32."""


class Averaged(StrategyMemory):
    """A strategy with an average of each master weight beside it."""

    def __init__(self, strategy: StrategyMemory) -> None:
        self.ranks = strategy.ranks
        self.averaged = strategy.averaged + ELEMENT
        self._strategy = strategy

    def held(self, moment: Moment) -> Iterator[Item]:
        elements, place = self.masters
        yield from self._strategy.held(moment)
        if moment.event != "load":
            yield Item(AVERAGE, place, ELEMENT * elements, "4 bytes x trained of this rank")

    def gradients(self, moment: Moment) -> Gradients:
        return self._strategy.gradients(moment)

    @property
    def masters(self) -> tuple[int, Place]:
        return self._strategy.masters

    @property
    def updated(self) -> int:
        return self._strategy.updated

    def traffic(self, microbatches: int) -> Iterator[Traffic]:
        return self._strategy.traffic(microbatches)

    def copies(self, microbatches: int) -> Copies:
        return self._strategy.copies(microbatches)


class EmaPlanner(Planner[EmaAverage]):
    """Of `average.ema`."""

    def forecast(self, topology: Topology, strategy: StrategyMemory) -> StrategyMemory:
        return Averaged(strategy)

    def trace(self, ctx: Context, engine: Engine) -> Engine:
        return self.stage.run(ctx, engine)
