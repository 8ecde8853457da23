"""Compare the strategies that installed stages offer, each with as little saved as it needs, and
find changes that would make a recipe fit."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from pipeline.engine import Engine
from pipeline.errors import PipeError, RecipeError, UsageError
from pipeline.planning.memory_plan import MemoryPlan
from pipeline.planning.planner import Tier, Topology
from pipeline.planning.report import memory
from pipeline.planning.search import Base, Changes, Way, balanced, best, leanest, overrides
from pipeline.presets import Strategy

MOST_NODES = 512
"""How far more nodes are looked for."""


class Candidate(NamedTuple):
    """The way of a strategy."""

    strategy: Strategy
    way: Way


class Remedy(NamedTuple):
    """Changes of a recipe, or machines, with which it would fit."""

    way: Way
    options: Sequence[str] = ()

    def line(self) -> str:
        """For people, to be pasted behind the command."""
        words = shlex.join([*self.options, *overrides(self.way.changes)])
        return f"{words}  ({memory(self.way.drawn)})"

    def record(self) -> dict[str, Any]:
        """JSON. Bytes of the fullest GPU, with what is lost beside tensors, and of the fullest
        host."""
        drawn = self.way.drawn
        on_cpu = drawn.topology.device == "cpu"
        return {
            "options": list(self.options),
            "overrides": overrides(self.way.changes),
            "device_bytes": None if on_cpu else drawn.margins.of(drawn.estimate.peak),
            "host_bytes": drawn.estimate.host_peak,
        }


def choose(
    base: Base, strategies: Sequence[Strategy], slot: str
) -> tuple[list[Candidate], list[str]]:
    """Every strategy that was tried, the best first if it fits, and those that cannot be tried, and
    why. One that offloads is tried only where none before it fits. Raises StageError for a model of
    which nothing can be told."""
    tried: list[Candidate] = []
    refused = []
    for _, tier in groupby(strategies, key=lambda one: max(one.order, Tier.OFFLOADED - 1)):
        for strategy in tier:
            try:
                way = balanced(leanest(base, {slot: strategy.generous}))
                tried.append(Candidate(strategy, way))
            except (RecipeError, UsageError) as error:
                refused.append(f"{strategy.name}: {error}")
        chosen = best([one.way for one in tried])
        if chosen is not None:
            return sorted(tried, key=lambda one: (one.way is not chosen, not one.way.fits)), refused
    return tried, refused


def on_more_nodes(base: Base, topology: Topology, start: Changes) -> Way | None:
    """The leanest way on the fewest nodes, doubling, on which it fits with these changes, nothing
    changed of what is computed, and a sample for each rank. None if it does not on MOST_NODES, or
    cannot be planned there."""
    nodes = topology.nodes
    while (nodes := nodes * 2) <= MOST_NODES:
        asked = replace(base.asked, nodes=nodes, gpus=topology.local_ranks)
        try:
            way = leanest(replace(base, asked=asked), start, narrow=False)
        except PipeError:  # such as a batch that is smaller than the ranks
            return None
        if way.fits and not way.drawn.idle:
            return way
    return None


def suited(strategies: Sequence[Strategy], topology: Topology) -> list[Strategy]:
    """The strategies that are not another one under a second name there."""
    several = topology.ranks > 1

    def differs(order: int) -> bool:
        if order >= Tier.OFFLOADED:
            return topology.device != "cpu"
        if order == Tier.SHARDED_WITHIN_NODES:
            return 1 < topology.nodes < topology.ranks
        return several or order == Tier.REPLICATED

    return [one for one in strategies if differs(one.order)]


def remedies(drawn: MemoryPlan, base: Base, strategies: Sequence[Strategy]) -> Iterator[Remedy]:
    """At most one of each kind: savings of the recipe's own stages, another strategy with them,
    more nodes. Raises PipeError where the recipe itself cannot be planned."""
    own = balanced(leanest(base, {}))
    if own.fits:
        yield Remedy(own)
    wraps = [one for one in drawn.plan.steps if issubclass(one.gives or object, Engine)]
    others = [
        strategy
        for strategy in strategies
        for step in wraps[:1]
        if (step.use, *(getattr(step.stage, name, None) for name in strategy.fields))
        != (strategy.use, *strategy.fields.values())
    ]
    slot = wraps[0].slot if wraps else ""
    tried, _ = choose(base, suited(others, drawn.topology), slot)
    if tried and tried[0].way.fits:
        yield Remedy(tried[0].way)
    if drawn.topology.device != "cpu":
        sharded = [{slot: one.generous} for one in others if one.order == Tier.SHARDED]
        for start in ({}, *sharded):
            way = on_more_nodes(base, drawn.topology, start)
            if way is not None:
                there = way.drawn.topology
                with contextlib.suppress(PipeError):
                    way = balanced(way)
                yield Remedy(way, ["--gpus", str(there.local_ranks), "--nodes", str(there.nodes)])
                return
