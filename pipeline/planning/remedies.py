"""What would make a recipe fit."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from pipeline.engine import Engine
from pipeline.errors import PipeError
from pipeline.planning.memory_plan import MemoryPlan
from pipeline.planning.planner import Tier
from pipeline.planning.report import gib
from pipeline.planning.search import Change, Draw, Way, best, folded, ways
from pipeline.planning.strategies import suited, wrapped
from pipeline.presets import Strategy

MOST_TIMES = 64
"""How many times as many nodes are looked at."""

DrawOn = Callable[[int, Sequence[Change]], MemoryPlan]
"""How many times the nodes, changes -> the plan. Raises PipeError."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Changes of the recipe, or machines, with which it would fit."""

    options: Sequence[str]
    way: Way

    def line(self) -> str:
        """For people, to be pasted behind the command."""
        drawn = self.way.drawn
        words = [*self.options, *(change.override for change in folded(self.way.changes))]
        return f"{shlex.join(words)}  ({_needs(drawn)})"


def _needs(drawn: MemoryPlan) -> str:
    if drawn.topology.device == "cpu":
        return f"{gib(drawn.estimate.host_peak)} GiB a node"
    return f"{gib(drawn.margins.of(drawn.estimate.peak))} GiB a GPU"


def remedies(drawn: MemoryPlan, draw: DrawOn, strategies: Sequence[Strategy]) -> Iterator[Remedy]:
    """At most one of each kind: savings of the recipe's own stages, another strategy with them,
    more nodes."""
    same = partial(draw, 1)
    own = best(list(ways([], same)))
    if own is not None:
        yield Remedy(options=(), way=own)
    yield from _otherwise(drawn, same, strategies)
    if drawn.topology.device != "cpu":
        yield from _more(drawn, draw, strategies)


def _more(drawn: MemoryPlan, draw: DrawOn, strategies: Sequence[Strategy]) -> Iterator[Remedy]:
    """The fewest nodes, doubling, on which it fits as it is wrapped, or else sharded over all of
    them, with as little saved as is needed."""
    slot = _wrap_slot(drawn)
    sharded = [wrapped(named, slot) for named in strategies if named.order == Tier.SHARDED and slot]
    for start in ([], *([one] for one in sharded)):
        times = 2
        while times <= MOST_TIMES:
            try:
                found = best(list(ways(start, partial(draw, times))))
            except PipeError:  # such as a batch that is smaller than the ranks
                break
            if found is not None:
                topology = drawn.topology
                options = [
                    "--gpus",
                    str(topology.local_ranks),
                    "--nodes",
                    str(topology.nodes * times),
                ]
                yield Remedy(options=options, way=found)
                return
            times *= 2


def _otherwise(drawn: MemoryPlan, draw: Draw, strategies: Sequence[Strategy]) -> Iterator[Remedy]:
    """The first other strategy that fits."""
    slot = _wrap_slot(drawn)
    topology = drawn.topology
    for named in suited(strategies, topology.nodes, topology.ranks) if slot else ():
        if _is_there(drawn, slot, named):
            continue
        try:
            found = best(list(ways([wrapped(named, slot)], draw)))
        except PipeError:  # it does not go with the rest of the recipe
            continue
        if found is not None:
            yield Remedy(options=(), way=found)
            return


def _wrap_slot(drawn: MemoryPlan) -> str:
    """The first slot that makes an engine."""
    for step in drawn.plan.steps:
        if step.gives is not None and issubclass(step.gives, Engine):
            return step.slot
    return ""


def _is_there(drawn: MemoryPlan, slot: str, named: Strategy) -> bool:
    step = next(step for step in drawn.plan.steps if step.slot == slot)
    fields = named.fields
    return step.use == named.use and all(getattr(step.stage, k) == v for k, v in fields.items())
