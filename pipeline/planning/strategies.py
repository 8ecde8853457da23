"""Walk through the strategies until one fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from pipeline.errors import RecipeError
from pipeline.planning.memory_plan import MemoryPlan
from pipeline.planning.planner import Tier
from pipeline.planning.report import gib
from pipeline.planning.search import Change, Draw, Way, best, needed, ways
from pipeline.presets import Strategy

WRAP = "wrap"
"""The slot of a recipe that is drawn up."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One way of one strategy."""

    strategy: Strategy
    way: Way

    @property
    def what(self) -> str:
        """The strategy, and what was changed besides."""
        saved = [one.override for one in self.way.changes if one.path != WRAP]
        if not saved:
            return f"{self.strategy.name}: {self.strategy.what}"
        return f"{self.strategy.name} with {' '.join(saved)}"

    def told(self) -> str:
        """One line of numbers."""
        drawn = self.way.drawn
        device = drawn.margins.of(drawn.estimate.peak)
        there = drawn.hardware.device_memory
        parts = [
            f"{gib(device)} GiB of {gib(there)} a GPU" if there else f"{gib(device)} GiB a GPU",
            _on_host(drawn),
            *_time(drawn),
        ]
        if drawn.idle:
            parts.append(f"{drawn.idle} of {drawn.topology.ranks} GPUs without a sample")
        return ", ".join(parts)


def _on_host(drawn: MemoryPlan) -> str:
    peak, there = gib(drawn.estimate.host_peak), drawn.hardware.host_memory
    return f"{peak} GiB of {gib(there)} a host" if there else f"if a host has {peak} GiB"


def _time(drawn: MemoryPlan) -> Iterator[str]:
    time = drawn.time
    if time is None or not time.parts:
        return
    unknown = f"; {' and '.join(time.unknown)} not known" if time.unknown else ""
    yield f"a step of {time.least:.3g} s ({time.bound}) to {time.most:.3g} s{unknown}"


@dataclass(kw_only=True)
class Walk:
    """Tries one strategy after another, each with what its stages can save."""

    draw: Draw
    strategies: Sequence[Strategy]
    nodes: int
    ranks: int
    tried: list[Tried] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """What cannot be tried here, and why."""

    def run(self) -> Tried | None:
        """The best way of all strategies that hold everything on GPUs; if none of them fits, of the
        first that fits of those that offload. None if none does."""
        for _, group in groupby(suited(self.strategies, self.nodes, self.ranks), key=_offloaded):
            first = len(self.tried)
            for strategy in group:
                self._try(strategy)
            found = self.tried[first:]
            way = best([one.way for one in found])
            if way is not None:
                return next(one for one in found if one.way is way)
        return None

    def _try(self, strategy: Strategy) -> None:
        if not strategy.foretold:
            self.refused.append(f"{strategy.name}: {strategy.use} has no forecast")
            return
        try:
            for way in ways([wrapped(strategy)], self.draw):
                self.tried.append(Tried(strategy=strategy, way=way))
        except RecipeError as error:
            self.refused.append(f"{strategy.name}: {error.problems[0].message}")


def of_each(tried: Sequence[Tried]) -> Iterator[Tried]:
    """The best of every strategy's ways; of those that do not fit, the one that needs least."""
    for _, group in groupby(tried, key=lambda one: one.strategy.name):
        found = list(group)
        way = best([one.way for one in found])
        if way is None:
            yield min(found, key=lambda one: needed(one.way.drawn))
        else:
            yield next(one for one in found if one.way is way)


def suited(strategies: Sequence[Strategy], nodes: int, ranks: int) -> Iterator[Strategy]:
    """Those that are not another one under a second name on so many nodes and ranks."""
    for strategy in strategies:
        sharded = Tier.REPLICATED < strategy.order < Tier.OFFLOADED
        within = strategy.order == Tier.SHARDED_WITHIN_NODES
        if (sharded and ranks == 1) or (within and not 1 < nodes < ranks):
            continue
        yield strategy


def wrapped(strategy: Strategy, slot: str = WRAP) -> Change:
    """The slot that wraps the model."""
    return Change(path=slot, value=strategy.generous, why=strategy.what)


def _offloaded(strategy: Strategy) -> int:
    """0 for what stays on GPUs, else how far it is offloaded."""
    return strategy.order if strategy.order >= Tier.OFFLOADED else 0
