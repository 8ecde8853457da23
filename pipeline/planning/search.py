"""Search for changes with which a recipe fits: savings of its stages, a strategy, more nodes.

All savings that only cost time are applied first. If that does not fit, one that changes numerics
is added. Then each without which the recipe fits is removed, the most expensive first.
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from pipeline.chain.plan import Plan
from pipeline.chain.registry import Registry
from pipeline.errors import PipeError, RecipeError, StageError, UsageError
from pipeline.planning.hardware import BETWEEN, INSIDE, HardwareOptions, Margins
from pipeline.planning.memory_plan import MemoryPlan, check, estimate_plan
from pipeline.planning.planner import AWAY, Planners, Saving, Strategy, Tier, in_order, planned
from pipeline.planning.report import memory
from pipeline.planning.shapes import Topology
from pipeline.recipe.fields import adapter
from pipeline.utils.activities import activity

LONGER = 1.1
"""Ratio up to which two step times count as equal: estimates of real steps were off by as much."""
MOST_NODES = 512
"""Limit of the search for a number of nodes on which a recipe fits."""
SLOWER = AWAY - 1
"""Largest order of the savings that only cost time, and put nothing in host memory."""
OWN = Strategy(name="", use="")
"""The recipe's own strategy."""
Changes = Mapping[str, Any]
"""Changed values of a recipe by `slot` or `slot.field`."""


def overrides(changes: Changes) -> list[str]:
    """The changes as arguments of a command."""
    return [f"{path}={json.dumps(value)}" for path, value in changes.items()]


@dataclass(frozen=True, kw_only=True)
class SearchBase:
    """A recipe on given machines, whose plans with changes are compared. options: what names these
    machines, if not the command. cannot: orders of savings that the model does not support."""

    recipe: Path
    overrides: Sequence[str] = ()
    machines: HardwareOptions
    margins: Margins
    registry: Registry
    options: Sequence[str] = ()
    cannot: set[int] = field(default_factory=set)
    _checked: dict[tuple[str, ...], Plan] = field(default_factory=dict, init=False)
    _plans: dict[tuple[str, ...], MemoryPlan] = field(default_factory=dict, init=False)

    def checked(self, changes: Changes) -> Plan:
        """The recipe with changes, checked once. Raises RecipeError."""
        key = tuple(overrides(changes))
        if key not in self._checked:
            changed = [*self.overrides, *key]
            self._checked[key] = check(self.recipe, changed, self.machines, self.registry)
        return self._checked[key]

    def memory_plan(self, changes: Changes) -> MemoryPlan:
        """The memory plan of the recipe with changes, estimated once. Raises PipeError."""
        key = tuple(sorted(overrides(changes)))
        if key not in self._plans:
            self._plans[key] = estimate_plan(self.checked(changes), self.machines, self.margins)
        return self._plans[key]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A recipe with savings, possibly under another strategy. start: changes in addition to
    savings, whose `fields` are changes too."""

    base: SearchBase
    start: Changes
    saved: Sequence[Saving] = ()
    strategy: Strategy = OWN

    @property
    def saving(self) -> Changes:
        """Changes of all savings; a later one wins over an earlier one of the same field."""
        return {path: value for one in self.saved for path, value in one.fields.items()}

    @property
    def changes(self) -> Changes:
        """All changes; changes of fields go into the new slot where a whole slot is replaced."""
        made = dict(self.start)
        for path, value in self.saving.items():
            slot, _, name = path.partition(".")
            made |= {slot: {**made[slot], name: value}} if slot in made else {path: value}
        return made

    @property
    def memory_plan(self) -> MemoryPlan:
        return self.base.memory_plan(self.changes)

    @property
    def fits(self) -> bool:
        """Whether neither device nor host memory is short."""
        return not self.memory_plan.short

    @property
    def narrow(self) -> int:
        """Largest order of the savings that change numerics; 0 without one."""
        return max((one.order for one in self.saved if one.order > AWAY), default=0)

    def without(self, saved: Saving) -> Candidate:
        return replace(self, saved=[one for one in self.saved if one is not saved])

    def line(self) -> str:
        """Arguments to add to a command, and the memory that the recipe then needs."""
        words = shlex.join([*self.base.options, *overrides(self.changes)])
        return f"{words}  ({memory(self.memory_plan)})"

    def record(self) -> dict[str, Any]:
        """The changes as JSON, and bytes of the fullest GPU (with margins) and host."""
        on_cpu = self.memory_plan.topology.device == "cpu"
        return {
            "options": list(self.base.options),
            "overrides": overrides(self.changes),
            "device_bytes": None if on_cpu else self.memory_plan.needed,
            "host_bytes": self.memory_plan.estimate.host_peak,
        }


def most_saving(base: SearchBase, start: Changes, most: float = math.inf) -> Candidate:
    """Apply every saving that only costs time and, if that does not fit, what waits in host memory,
    and one that changes numerics; none with an order above `most`. Raises RecipeError for changes
    `start` that the recipe does not accept, and StageError and UsageError as planning does."""
    plan, every, seen = base.checked(start), list[Saving](), list[Saving]()
    while left := [one for one in _offered(plan) if one not in seen]:
        seen.append(left[0])
        with contextlib.suppress(RecipeError):  # savings that the recipe accepts together
            plan = base.checked(Candidate(base=base, start=start, saved=[*every, left[0]]).changes)
            every.append(left[0])
    every = [one for one in every if one.order <= most and one.order not in base.cannot]
    slower = [one for one in every if one.order < AWAY]
    host = [one for one in every if one.order == AWAY]
    # What waits in host memory may be too much for the host, so all is tried without it first.
    hosts = [[], host] if host else [[]]
    narrower = [[one] for one in every if one.order > AWAY]
    for more in [*hosts, *([*some, *one] for one in narrower for some in hosts)]:
        candidate = _possible(Candidate(base=base, start=start, saved=[*slower, *more]))
        if candidate.fits:
            break
    return candidate


def _offered(plan: Plan) -> list[Saving]:
    """Savings that the planners of all slots offer, in order, as changes of the recipe."""
    found = []
    for slot, planner in Planners.installed().of(plan).items():
        for saving in planner.savings(plan.view.data_ranks(planner.stage)):
            if saving.order == AWAY and plan.view.device == "cpu":
                continue  # the host is the device
            changes = {f"{slot}.{name}": value for name, value in saving.fields.items()}
            for given, fields in saving.beside.items():
                kind = [one.slot for one in plan.giving(given)]
                changes |= {f"{at}.{name}": value for at in kind for name, value in fields.items()}
            found.append(replace(saving, fields=changes, beside={}))
    return sorted(found, key=lambda one: one.order)


def _possible(candidate: Candidate) -> Candidate:
    """The candidate, or the candidate without the savings of one order if the model does not
    support them, which shows only when it is built."""
    for order in (0, *dict.fromkeys(one.order for one in reversed(candidate.saved))):
        rest = replace(candidate, saved=[one for one in candidate.saved if one.order != order])
        with contextlib.suppress(StageError):
            if rest.memory_plan and order:
                candidate.base.cannot.add(order)
            return rest
    return candidate


def relaxed(candidate: Candidate) -> Candidate:
    """Remove each saving that saves nothing, or without which the candidate still fits with
    head-room; one without that keeps all that only cost time."""
    for one in reversed(candidate.saved if candidate.fits else ()):
        less, its = candidate.without(one), candidate.memory_plan
        mine = less.memory_plan
        optional = mine.roomy if its.roomy or one.order < AWAY else less.fits
        no_more = mine.needed <= its.needed and mine.estimate.host_peak <= its.estimate.host_peak
        candidate = less if optional or no_more else candidate
    return candidate


def best(found: Sequence[Candidate]) -> Candidate | None:
    """The first that fits (or None) of those that change numerics the least, then of those with
    head-room, of those that no other is faster and smaller than, of those whose expected step is
    within `LONGER` of the shortest (if all are known), and of those with the fewest savings."""
    able = [one for one in found if one.fits]
    able = [one for one in able if one.narrow == min(other.narrow for other in able)]
    able = [one for one in able if one.memory_plan.roomy] or able
    if able and not any(one.memory_plan.time.unknown for one in able):
        costs = [(one.memory_plan.time.expected, one.memory_plan.needed) for one in able]
        able = [
            one for one, (seconds, size) in zip(able, costs, strict=True)
            if not any(time <= seconds and needed < size for time, needed in costs)
        ]  # fmt: skip
        longest = LONGER * min(one.memory_plan.time.expected for one in able)
        able = [one for one in able if one.memory_plan.time.expected <= longest]
    return min(able, key=lambda one: len(one.saved), default=None)


def choose(
    base: SearchBase, strategies: Sequence[Strategy], slot: str
) -> tuple[list[Candidate], list[str]]:
    """Candidates of all strategies that were tried, the best first if it fits, and a line for each
    that cannot be tried. Those that divide samples or layers are tried if nothing else fits, or
    leaves ranks waiting; host memory for activations, then savings that change numerics, then
    offloading only if nothing fits without. Raises StageError for a model that cannot be planned.
    """
    tried: list[Candidate] = []
    refused: dict[str, str] = {}
    for _, tier in groupby(strategies, key=lambda one: max(one.order, Tier.OFFLOADED - 1)):
        every = [*tier]
        for most in (SLOWER, AWAY, math.inf):
            found = [*_tried(base, every, slot, refused, most)]
            chosen = best(found)
            if chosen is not None:
                found = sorted(found, key=lambda one: (one is not chosen, not one.fits))
                return [*found, *tried], [*refused.values()]
        tried += found
    return tried, [*refused.values()]


def _tried(
    base: SearchBase, strategies: Sequence[Strategy], slot: str, refused: dict[str, str],
    most: float,
) -> Iterator[Candidate]:  # fmt: skip
    """Each strategy with as few savings as it needs; `refused` gets those that cannot be tried."""
    found: list[Candidate] = []
    over: set[tuple[str, ...]] = set()
    for strategy in strategies:
        axes = tuple(strategy.axes)
        if axes:  # data parallelism may fit, leave no rank idle, and not be bound by a network
            chosen = best([one for one in found if not one.strategy.axes])
            plan = None if chosen is None else chosen.memory_plan
            enough = plan and not plan.idle and plan.time.bound not in (INSIDE, BETWEEN)
            if enough or axes in over:
                continue
        # Another strategy may divide a model that this one does not.
        errors = (RecipeError, UsageError, *((StageError,) if axes else ()))
        try:
            with activity(f"planning {strategy.name}"):
                candidate = most_saving(base, {slot: strategy.generous}, most)
                candidate = replace(relaxed(candidate), strategy=strategy)
        except errors as error:
            refused[strategy.name] = f"{strategy.name}: {error}"
            over.add(axes)
            continue
        if candidate.fits:
            over.add(axes)
        found.append(candidate)
        yield candidate


def on_more_nodes(base: SearchBase, topology: Topology, start: Changes) -> Candidate | None:
    """The recipe on the fewest nodes (doubling) on which it fits with savings that only cost time,
    and a sample for each rank; None if it does not fit on MOST_NODES or cannot be planned there."""
    nodes, local = topology.nodes, topology.local_ranks
    while (nodes := nodes * 2) <= MOST_NODES:
        machines = replace(base.machines, nodes=nodes, gpus=local)
        options = ["--gpus", str(local), "--nodes", str(nodes)]
        more = replace(base, machines=machines, options=options)
        try:
            with activity(f"planning on {nodes} nodes"):
                candidate = most_saving(more, start, SLOWER)
        except PipeError:  # such as a batch that is smaller than the ranks
            return None
        if candidate.fits and not candidate.memory_plan.idle:
            return candidate
    return None


def suited(strategies: Sequence[Strategy], topology: Topology) -> list[Strategy]:
    """Strategies that differ on this topology: sharding over one rank, say, is replication."""
    found = []
    for one in strategies:
        axes = one.axes
        if topology.ranks % math.prod(axes.values()) or topology.on_node % axes.get("tensor", 1):
            continue
        if one.order >= Tier.OFFLOADED:
            differs = topology.device != "cpu"
        elif one.order == Tier.SHARDED_WITHIN_NODES:
            differs = 1 < topology.nodes < topology.ranks
        else:
            differs = topology.ranks > 1 or one.order == Tier.REPLICATED
        found += [one] if differs else []
    return found


def remedies(memory_plan: MemoryPlan, base: SearchBase) -> Iterator[Candidate]:
    """Changes with which a recipe would fit, at most one of each kind: savings of its stages,
    another strategy, more nodes. Raises PipeError if the recipe itself cannot be planned."""
    own = relaxed(most_saving(base, {}))
    if own.fits:
        yield own
    plan, topology = memory_plan.plan, memory_plan.topology
    train = planned(plan.of_training(memory_plan.training) if memory_plan.training else plan)
    wrap = None if train is None else plan.wrap_of(train)
    if wrap is None:
        return
    others = []
    for one in in_order(base.registry):
        if one.use == wrap.use:
            kind: type = type(wrap.stage)
            made = adapter(kind).validate_python(dict(one.fields), strict=False)
            if all(getattr(made, name) == getattr(wrap.stage, name) for name in one.fields):
                continue  # the recipe's own
        others.append(one)
    tried, _ = choose(base, suited(others, topology), wrap.slot)
    if tried and tried[0].fits:
        yield tried[0]
    sharded = [{wrap.slot: one.generous} for one in others if one.order == Tier.SHARDED]
    for start in ({}, *sharded) if topology.device != "cpu" else ():
        candidate = on_more_nodes(base, topology, start)
        if candidate is not None:
            with contextlib.suppress(PipeError):
                candidate = relaxed(candidate)
            yield candidate
            return
