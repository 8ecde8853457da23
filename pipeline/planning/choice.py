"""Compare the strategies that installed stages offer, each with as few savings as it needs, and
find changes that would make a recipe fit."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from pipeline.chain.plan import PlannedSlot
from pipeline.errors import PipeError, RecipeError, StageError, UsageError
from pipeline.planning.hardware import BETWEEN, INSIDE
from pipeline.planning.memory_plan import MemoryPlan
from pipeline.planning.planner import Tier, planned
from pipeline.planning.presets import Strategy, in_order
from pipeline.planning.search import Candidate, Changes, SearchBase, best, most_saving, relaxed
from pipeline.planning.shapes import Topology
from pipeline.utils.activities import activity

MOST_NODES = 512
"""Limit of the search for a number of nodes on which a recipe fits."""


ALLOWED: Sequence[Mapping[str, bool]] = (
    {"away": False, "narrow": False},
    {"away": True, "narrow": False},
    {"away": True, "narrow": True},
)
"""Arguments of `most_saving`, in the order in which they are tried."""


def choose(
    base: SearchBase, strategies: Sequence[Strategy], slot: str
) -> tuple[list[Candidate], list[str]]:
    """Candidates of all strategies that were tried, the best first if it fits, and a line for each
    strategy that cannot be tried. Strategies under which ranks share samples or layers are tried if
    nothing else fits, or what fits leaves ranks waiting. Host memory is taken for activations only
    if nothing fits without, savings that change numerics are tried only if nothing fits so, and an
    offloading strategy only if no earlier one fits. Raises StageError for a model that cannot be
    planned."""
    tried: list[Candidate] = []
    refused: dict[str, str] = {}
    for _, tier in groupby(strategies, key=lambda one: max(one.order, Tier.OFFLOADED - 1)):
        every = [*tier]
        for allowed in ALLOWED:
            found = [*_tried(base, every, slot, refused, allowed)]
            chosen = best(found)
            if chosen is not None:
                found = sorted(found, key=lambda one: (one is not chosen, not one.fits))
                return [*found, *tried], [*refused.values()]
        tried += found
    return tried, [*refused.values()]


def _tried(
    base: SearchBase, strategies: Sequence[Strategy], slot: str, refused: dict[str, str],
    allowed: Mapping[str, bool],
) -> Iterator[Candidate]:  # fmt: skip
    """Each strategy with as few savings as it needs, in order. `refused` gets those that cannot be
    tried."""
    found: list[Candidate] = []
    over: set[tuple[str, ...]] = set()
    for strategy in strategies:
        axes = tuple(strategy.axes)
        if axes and (axes in over or _is_enough([one for one in found if not one.strategy.axes])):
            continue
        # Another strategy may divide a model that this one does not.
        errors = (RecipeError, UsageError, *((StageError,) if axes else ()))
        try:
            with activity(f"planning {strategy.name}"):
                candidate = most_saving(base, {slot: strategy.generous}, **allowed)
                candidate = replace(relaxed(candidate), strategy=strategy)
        except errors as error:
            refused[strategy.name] = f"{strategy.name}: {error}"
            over.add(axes)
            continue
        if candidate.fits:
            over.add(axes)
        found.append(candidate)
        yield candidate


def _is_enough(found: Sequence[Candidate]) -> bool:
    """Whether data parallelism fits, gives all ranks samples, and computes for as long as it
    communicates."""
    chosen = best(found)
    if chosen is None or chosen.memory_plan.idle:
        return False
    return chosen.memory_plan.time.bound not in (INSIDE, BETWEEN)


def on_more_nodes(base: SearchBase, topology: Topology, start: Changes) -> Candidate | None:
    """The recipe on the fewest nodes (doubling) on which it fits with the changes `start`, savings
    that only cost time, and a sample for each rank. None if it does not fit on MOST_NODES or cannot
    be planned there."""
    nodes, local = topology.nodes, topology.local_ranks
    while (nodes := nodes * 2) <= MOST_NODES:
        machines = replace(base.machines, nodes=nodes, gpus=local)
        options = ["--gpus", str(local), "--nodes", str(nodes)]
        more = replace(base, machines=machines, options=options)
        try:
            with activity(f"planning on {nodes} nodes"):
                candidate = most_saving(more, start, away=False, narrow=False)
        except PipeError:  # such as a batch that is smaller than the ranks
            return None
        if candidate.fits and not candidate.memory_plan.idle:
            return candidate
    return None


def suited(strategies: Sequence[Strategy], topology: Topology) -> list[Strategy]:
    """Strategies that differ from each other on this topology: sharding over one rank, say, is
    replication."""

    def differs(order: int, axes: Mapping[str, int]) -> bool:
        tensor, asked = axes.get("tensor", 1), math.prod(axes.values())
        if topology.ranks % asked or topology.on_node % tensor:
            return False
        if order >= Tier.OFFLOADED:
            return topology.device != "cpu"
        if order == Tier.SHARDED_WITHIN_NODES:
            return 1 < topology.nodes < topology.ranks
        return topology.ranks > 1 or order == Tier.REPLICATED

    return [one for one in strategies if differs(one.order, one.axes)]


def remedies(memory_plan: MemoryPlan, base: SearchBase) -> Iterator[Candidate]:
    """Changes with which a recipe would fit, at most one candidate of each kind: savings of its own
    stages, another strategy, more nodes. Raises PipeError if the recipe itself cannot be
    planned."""
    own = relaxed(most_saving(base, {}))
    if own.fits:
        yield own
    train = planned(memory_plan.plan)
    wrap = None if train is None else memory_plan.plan.wrap_of(train)
    known = in_order(base.registry)
    others = [one for one in known if wrap is not None and not _is(wrap, one)]
    slot = "" if wrap is None else wrap.slot
    tried, _ = choose(base, suited(others, memory_plan.topology), slot)
    if tried and tried[0].fits:
        yield tried[0]
    sharded = [{slot: one.generous} for one in others if one.order == Tier.SHARDED]
    for start in ({}, *sharded) if memory_plan.topology.device != "cpu" else ():
        candidate = on_more_nodes(base, memory_plan.topology, start)
        if candidate is not None:
            with contextlib.suppress(PipeError):
                candidate = relaxed(candidate)
            yield candidate
            return


def _is(step: PlannedSlot, strategy: Strategy) -> bool:
    """Whether a slot already has the strategy."""
    fields = {name: getattr(step.stage, name, None) for name in strategy.fields}
    return (step.use, fields) == (strategy.use, strategy.fields)
