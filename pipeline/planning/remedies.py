"""Find changes that would make a recipe fit."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.engine import Engine
from pipeline.planning.memory_plan import MemoryPlan
from pipeline.planning.planner import Tier
from pipeline.planning.search import Base, Way, best, overrides, ways
from pipeline.planning.strategies import choose, memory, on_more_nodes, suited, wrapped
from pipeline.presets import Strategy


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Changes of the recipe, or machines, with which it would fit."""

    options: Sequence[str] = ()
    way: Way

    def line(self) -> str:
        """For people, to be pasted behind the command."""
        words = shlex.join([*self.options, *overrides(self.way.changes)])
        return f"{words}  ({memory(self.way.drawn)})"


def remedies(drawn: MemoryPlan, base: Base, strategies: Sequence[Strategy]) -> Iterator[Remedy]:
    """At most one of each kind: savings of the recipe's own stages, another strategy with them,
    more nodes. Raises PipeError where the recipe itself cannot be planned without a trace."""
    own = best(ways(base, {}))
    if own is not None:
        yield Remedy(way=own)
    slot = _wrap_slot(drawn)
    others = [one for one in strategies if slot and not _is_there(drawn, slot, one)]
    tried, _ = choose(base, [*suited(others, drawn.topology)], slot)
    if tried and tried[0].way.fits:
        yield Remedy(way=tried[0].way)
    if drawn.topology.device != "cpu":
        sharded = [wrapped(named, slot) for named in others if named.order == Tier.SHARDED]
        more = (on_more_nodes(base, drawn.topology, start) for start in ({}, *sharded))
        for asked, way in itertools.islice(filter(None, more), 1):
            yield Remedy(options=["--gpus", str(asked.gpus), "--nodes", str(asked.nodes)], way=way)


def _wrap_slot(drawn: MemoryPlan) -> str:
    """The first slot that makes an engine; empty without one."""
    steps = drawn.plan.steps
    return next((step.slot for step in steps if issubclass(step.gives or object, Engine)), "")


def _is_there(drawn: MemoryPlan, slot: str, named: Strategy) -> bool:
    step = next(step for step in drawn.plan.steps if step.slot == slot)
    fields = named.fields
    return step.use == named.use and all(getattr(step.stage, k) == v for k, v in fields.items())
