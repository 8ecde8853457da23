"""Compare the strategies that installed stages offer, each with as little saved as it needs, and
find changes that would make a recipe fit."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from pipeline.contracts.engine import Engine
from pipeline.errors import PipeError, RecipeError, UsageError
from pipeline.plan.plan import PlannedSlot
from pipeline.planning.memory_plan import MemoryPlan
from pipeline.planning.planner import Tier, Topology
from pipeline.planning.presets import Strategy
from pipeline.planning.report import memory
from pipeline.planning.search import Base, Changes, Way, balanced, best, leanest, overrides

MOST_NODES = 512
"""How far more nodes are looked for."""


def choose(base: Base, strategies: Sequence[Strategy], slot: str) -> tuple[list[Way], list[str]]:
    """The way of every strategy that was tried, the best first if it fits, and those that cannot be
    tried, and why. What is computed is changed only where nothing fits without, and one that
    offloads is tried only where none before it fits. Raises StageError for a model of which nothing
    can be told."""
    tried: list[Way] = []
    refused: dict[str, str] = {}
    for _, tier in groupby(strategies, key=lambda one: max(one.order, Tier.OFFLOADED - 1)):
        every = [*tier]
        for narrow in (False, True):
            found = []
            for strategy in every:
                try:
                    way = leanest(base, {slot: strategy.generous}, narrow=narrow)
                    found.append(replace(balanced(way), strategy=strategy))
                except (RecipeError, UsageError) as error:
                    refused[strategy.name] = f"{strategy.name}: {error}"
            chosen = best(found)
            if chosen is not None:
                found = sorted(found, key=lambda way: (way is not chosen, not way.fits))
                return [*found, *tried], [*refused.values()]
        tried += found
    return tried, [*refused.values()]


def on_more_nodes(base: Base, topology: Topology, start: Changes) -> Way | None:
    """The leanest way on the fewest nodes, doubling, on which it fits with these changes, nothing
    changed of what is computed, and a sample for each rank. None if it does not on MOST_NODES, or
    cannot be planned there."""
    nodes, local = topology.nodes, topology.local_ranks
    while (nodes := nodes * 2) <= MOST_NODES:
        asked = replace(base.asked, nodes=nodes, gpus=local)
        options = ["--gpus", str(local), "--nodes", str(nodes)]
        try:
            way = leanest(replace(base, asked=asked, options=options), start, narrow=False)
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


def remedies(drawn: MemoryPlan, base: Base, strategies: Sequence[Strategy]) -> Iterator[Way]:
    """Changes with which a recipe would fit, at most one way of each kind: savings of its own
    stages, another strategy with them, more nodes. Raises PipeError where the recipe itself cannot
    be planned."""
    own = balanced(leanest(base, {}))
    if own.fits:
        yield own
    wraps = [one for one in drawn.plan.steps if issubclass(one.gives or object, Engine)]
    others = [one for one in strategies for step in wraps[:1] if not _is(step, one)]
    slot = wraps[0].slot if wraps else ""
    tried, _ = choose(base, suited(others, drawn.topology), slot)
    if tried and tried[0].fits:
        yield tried[0]
    sharded = [{slot: one.generous} for one in others if one.order == Tier.SHARDED]
    for start in ({}, *sharded) if drawn.topology.device != "cpu" else ():
        way = on_more_nodes(base, drawn.topology, start)
        if way is not None:
            with contextlib.suppress(PipeError):
                way = balanced(way)
            yield way
            return


def _is(step: PlannedSlot, strategy: Strategy) -> bool:
    """Whether a slot has a strategy already."""
    fields = {name: getattr(step.stage, name, None) for name in strategy.fields}
    return (step.use, fields) == (strategy.use, strategy.fields)


def line(way: Way) -> str:
    """Words to write behind a command, and what they come to, for people."""
    words = shlex.join([*way.base.options, *overrides(way.changes)])
    return f"{words}  ({memory(way.drawn)})"


def record(way: Way) -> dict[str, Any]:
    """JSON. Bytes of the fullest GPU, with what is lost beside tensors, and of the fullest host."""
    drawn = way.drawn
    on_cpu = drawn.topology.device == "cpu"
    return {
        "options": list(way.base.options),
        "overrides": overrides(way.changes),
        "device_bytes": None if on_cpu else drawn.margins.of(drawn.estimate.peak),
        "host_bytes": drawn.estimate.host_peak,
    }
