"""Ways to a recipe that needs less memory, by what its stages say that they can do without.

First everything is saved that costs time alone; only if that does not fit, what changes what is
computed too, one kind after another. Of what fits, one saving after another is given back as long
as it still fits, so whatever is saved in the end is so for a reason.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import RecipeError, StageError
from pipeline.plan import Plan
from pipeline.planning import planner
from pipeline.planning.hardware import Asked
from pipeline.planning.margins import Margins, Shortage
from pipeline.planning.memory_plan import MemoryPlan, check, draw_up_plan
from pipeline.planning.planner import CHUNK, RECOMPUTE, REDUCE, SMALLER, Planners, Saving
from pipeline.registry import Registry

NARROW = planner.NARROW_FROZEN, planner.NARROW_MASTERS, planner.NARROW_MOMENTS
"""Orders of savings that change what is computed, the one to be given back first at its head."""
GIVEN_BACK = (RECOMPUTE, SMALLER, REDUCE, CHUNK), (SMALLER, REDUCE, RECOMPUTE, CHUNK)
"""Two sequences for those that cost time. Which is faster depends on the machines: computing again
keeps GPUs busy, small micro-batches keep the network busy."""
LITTLE = SMALLER, CHUNK
"""Orders of savings that cost little, and are given back only while ROOMY of a GPU is left."""
ROOMY = 0.1
"""Share of a GPU's memory; margins are no measurements."""
TELLING = 1.1
"""How many times as long as another a step has to be estimated to count as longer: less is within
what estimates were off on real steps."""

Changes = Mapping[str, Any]
"""Changes of a recipe: `slot` or `slot.field` -> value."""


def overrides(changes: Changes) -> list[str]:
    """Arguments of commands."""
    return [f"{path}={json.dumps(value)}" for path, value in changes.items()]


@dataclass(frozen=True, kw_only=True)
class Base:
    """A recipe at a place, to be planned with changes."""

    recipe: Path
    overrides: Sequence[str] = ()
    asked: Asked
    margins: Margins
    registry: Registry
    cannot: set[int] = field(default_factory=set)
    """Orders of savings that the model turned out not to have."""
    _drawn: dict[tuple[str, ...], MemoryPlan] = field(default_factory=dict, init=False)

    def checked(self, changes: Changes) -> Plan:
        """The recipe with changes, without what it needs. Raises RecipeError."""
        changed = [*self.overrides, *overrides(changes)]
        return check(self.recipe, changed, self.asked, self.registry)

    def drawn(self, changes: Changes) -> MemoryPlan:
        """The plan of the recipe with changes; each is drawn up once. Raises PipeError."""
        key = tuple(sorted(overrides(changes)))
        if key not in self._drawn:
            self._drawn[key] = draw_up_plan(self.checked(changes), self.asked, self.margins)
        return self._drawn[key]


class Saved(NamedTuple):
    """A saving that is made."""

    saving: Saving
    changes: Changes


@dataclass(frozen=True, kw_only=True)
class Way:
    """A recipe with changes, and what it would need."""

    start: Changes
    saved: Sequence[Saved]
    drawn: MemoryPlan
    needed: Mapping[int, Shortage] = field(default_factory=dict)
    """Order of savings -> what was short with one of them less."""

    @property
    def changes(self) -> Changes:
        """All of them."""
        return _together(self.start, self.saved)

    @property
    def fits(self) -> bool:
        """Whether nothing is short."""
        return not self.drawn.short

    @property
    def narrow(self) -> int:
        """How much is changed of what is computed: 0 for nothing, or an order of savings."""
        orders = (one.saving.order for one in self.saved)
        return max((order for order in orders if order in NARROW), default=0)


def ways(base: Base, start: Changes, *, narrow: bool = True) -> list[Way]:
    """The ways that fit and from which nothing can be given back, or the one with everything saved
    if that does not fit; `narrow`: also by savings that change what is computed. Raises RecipeError
    where the recipe cannot be changed so, and StageError and UsageError as planning does."""
    every = [one for one in _savings(base, start) if one.saving.order not in base.cannot]
    for most in (SMALLER, *reversed(NARROW)) if narrow else (SMALLER,):
        least = _leanest(base, start, [one for one in every if one.saving.order <= most])
        if least.fits:
            return [_given_back(base, least, [*NARROW, *orders]) for orders in GIVEN_BACK]
    return [least]


def _leanest(base: Base, start: Changes, saved: Sequence[Saved]) -> Way:
    """With all of these savings, or without those of one order that the model cannot have, which
    only building it tells."""
    try:
        return Way(start=start, saved=saved, drawn=base.drawn(_together(start, saved)))
    except StageError as error:
        for order in dict.fromkeys(one.saving.order for one in reversed(saved)):
            rest = [one for one in saved if one.saving.order != order]
            with contextlib.suppress(StageError):
                way = Way(start=start, saved=rest, drawn=base.drawn(_together(start, rest)))
                base.cannot.add(order)
                return way
        raise error


def _savings(base: Base, start: Changes) -> list[Saved]:
    """One saving after another, each that goes with the recipe and with those before it."""
    plan = base.checked(start)
    saved: list[Saved] = []
    seen: list[tuple[str, Saving]] = []
    while left := [one for one in _offered(plan) if one not in seen]:
        seen.append(left[0])
        more = [*saved, Saved(left[0][1], _changes(plan, *left[0]))]
        try:
            plan, saved = base.checked(_together(start, more)), more
        except RecipeError:
            continue
    return saved


def _offered(plan: Plan) -> list[tuple[str, Saving]]:
    """Slot and saving, of all stages that can do with less."""
    found = [
        (slot, saving)
        for slot, planner in Planners.installed().of(plan).items()
        if hasattr(planner, "savings")
        for saving in planner.savings(plan.view.procs)
    ]
    return sorted(found, key=lambda one: one[1].order)


def _changes(plan: Plan, slot: str, saving: Saving) -> Changes:
    """A saving's fields, of its own slot and of those that give what goes with it."""
    beside = [
        (step.slot, fields)
        for given, fields in saving.beside.items()
        for step in plan.steps
        if issubclass(step.gives or object, given)
    ]
    every = [(slot, saving.fields), *beside]
    return {f"{place}.{name}": value for place, one in every for name, value in one.items()}


def _together(start: Changes, saved: Sequence[Saved]) -> Changes:
    """All changes; of two that set the same field, the later."""
    together = dict(start)
    for one in saved:
        together |= one.changes
    return together


def _given_back(base: Base, way: Way, orders: Sequence[int]) -> Way:
    """Without as many savings of each order as are not needed."""
    for order in orders:
        while latest := [one for one in way.saved if one.saving.order == order][-1:]:
            rest = [one for one in way.saved if one is not latest[0]]
            less = replace(way, saved=rest, drawn=base.drawn(_together(way.start, rest)))
            if not less.fits:
                way = replace(way, needed={**way.needed, order: less.drawn.short[0]})
            if not less.fits or (order in LITTLE and _crowds(less.drawn, way.drawn)):
                break
            way = less
    return way


def _crowds(less: MemoryPlan, way: MemoryPlan) -> bool:
    """Whether with a saving less more is needed, and too little room is left."""
    there = less.hardware.device_memory or math.inf
    needed = less.margins.of(less.estimate.peak)
    return less.estimate.peak > way.estimate.peak and needed > (1 - ROOMY) * there


def best(found: Sequence[Way]) -> Way | None:
    """The way with the fewest savings among those that fit, change what is computed the least, and
    whose step is not longer than the shortest by what the estimate can tell. None if none fits."""
    able = [way for way in found if way.fits]
    able = [way for way in able if way.narrow == min(one.narrow for one in able)]
    if not any(way.drawn.time.unknown for way in able):
        longest = TELLING * min((seconds(way.drawn) for way in able), default=0.0)
        able = [way for way in able if seconds(way.drawn) <= longest]
    return min(able, key=lambda way: len(way.saved), default=None)


def seconds(drawn: MemoryPlan) -> float:
    """Seconds of a step, as far as it is estimated."""
    return drawn.time.expected
