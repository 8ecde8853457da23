"""Recipes that need less memory, by what their stages say that they can do without.

All savings that cost time alone are made first. Only where they do not do, what is computed is
changed too, in one way. Then each saving is given back, if it fits without, the dearest first.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import RecipeError, StageError
from pipeline.plan.plan import Plan
from pipeline.plan.registry import Registry
from pipeline.planning.hardware import Asked, Margins
from pipeline.planning.memory_plan import MemoryPlan, check, draw_up
from pipeline.planning.planner import RECOMPUTE, Planners
from pipeline.planning.presets import Strategy

LONGER = 1.1
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
    options: Sequence[str] = ()
    """Options that name machines other than those of the command."""
    cannot: set[int] = field(default_factory=set)
    """Orders of savings that the model turned out not to have."""
    _checked: dict[tuple[str, ...], Plan] = field(default_factory=dict, init=False)
    _drawn: dict[tuple[str, ...], MemoryPlan] = field(default_factory=dict, init=False)

    def checked(self, changes: Changes) -> Plan:
        """The recipe with changes, without what it needs; each is checked once. Raises
        RecipeError."""
        key = tuple(overrides(changes))
        if key not in self._checked:
            changed = [*self.overrides, *key]
            self._checked[key] = check(self.recipe, changed, self.asked, self.registry)
        return self._checked[key]

    def drawn(self, changes: Changes) -> MemoryPlan:
        """The plan of the recipe with changes; each is drawn up once. Raises PipeError."""
        key = tuple(sorted(overrides(changes)))
        if key not in self._drawn:
            self._drawn[key] = draw_up(self.checked(changes), self.asked, self.margins)
        return self._drawn[key]


OWN = Strategy(name="", use="", fields={})
"""The recipe's own."""


class Saved(NamedTuple):
    """A saving, as changes of a recipe."""

    order: int
    what: str
    changes: Changes


@dataclass(frozen=True, kw_only=True)
class Way:
    """A recipe with savings, maybe under another strategy."""

    base: Base
    start: Changes
    """Changes that are made besides."""
    saved: Sequence[Saved] = ()
    strategy: Strategy = OWN

    @property
    def saving(self) -> Changes:
        """Changes that save; of two that set the same field, the later."""
        return {path: value for one in self.saved for path, value in one.changes.items()}

    @property
    def changes(self) -> Changes:
        """All changes; those of a slot that is changed as a whole are made in it."""
        made = dict(self.start)
        for path, value in self.saving.items():
            slot, _, name = path.partition(".")
            made |= {slot: {**made[slot], name: value}} if slot in made else {path: value}
        return made

    @property
    def drawn(self) -> MemoryPlan:
        """Its plan. Raises PipeError."""
        return self.base.drawn(self.changes)

    @property
    def fits(self) -> bool:
        """Whether nothing is short."""
        return not self.drawn.short

    @property
    def narrow(self) -> int:
        """How much is changed of what is computed: 0 for nothing, or an order of savings."""
        return max((one.order for one in self.saved if one.order > RECOMPUTE), default=0)

    def without(self, saved: Saved) -> Way:
        """This way without one of its savings."""
        return replace(self, saved=[one for one in self.saved if one is not saved])


def leanest(base: Base, start: Changes, *, narrow: bool = True) -> Way:
    """The way that saves whatever it can at the price of time, and, if that does not fit, with
    `narrow` changes one thing in what is computed. Raises RecipeError where the recipe cannot be
    changed so, and StageError and UsageError as planning does."""
    every = [one for one in _savings(base, start) if one.order not in base.cannot]
    slower = [one for one in every if one.order <= RECOMPUTE]
    for more in [[], *([one] for one in every if narrow and one.order > RECOMPUTE)]:
        way = _possible(Way(base=base, start=start, saved=[*slower, *more]))
        if way.fits:
            break
    return way


def balanced(way: Way) -> Way:
    """The way without the savings that it fits without; the same where it does not fit."""
    for one in reversed(way.saved if way.fits else ()):
        less = way.without(one)
        way = less if less.fits else way
    return way


def best(found: Sequence[Way]) -> Way | None:
    """The first way with the fewest savings among those that fit, change what is computed the
    least, and, where rates of all are known, are quickest by what the estimate can tell. None if
    none fits."""
    able = [way for way in found if way.fits]
    able = [way for way in able if way.narrow == min(one.narrow for one in able)]
    if able and not any(way.drawn.time.unknown for way in able):
        longest = LONGER * min(way.drawn.time.expected for way in able)
        able = [way for way in able if way.drawn.time.expected <= longest]
    return min(able, key=lambda way: len(way.saved), default=None)


def _possible(way: Way) -> Way:
    """The way, or without the savings of one order that the model cannot have, which only building
    it tells."""
    for order in (0, *dict.fromkeys(one.order for one in reversed(way.saved))):
        rest = replace(way, saved=[one for one in way.saved if one.order != order])
        with contextlib.suppress(StageError):
            if rest.drawn and order:
                way.base.cannot.add(order)
            return rest
    return way


def _savings(base: Base, start: Changes) -> list[Saved]:
    """One saving after another, each that goes with the recipe and with those before it."""
    plan, saved, seen = base.checked(start), list[Saved](), list[Saved]()
    while left := [one for one in _offered(plan) if one not in seen]:
        seen.append(left[0])
        more = Way(base=base, start=start, saved=[*saved, left[0]])
        with contextlib.suppress(RecipeError):
            plan = base.checked(more.changes)
            saved.append(left[0])
    return saved


def _offered(plan: Plan) -> list[Saved]:
    """Savings of all stages, those first that are tried first."""
    found = []
    for slot, planner in Planners.installed().of(plan).items():
        for saving in planner.savings(plan.view.procs):
            changed = [(slot, saving.fields)]
            for given, fields in saving.beside.items():
                kind = (one.slot for one in plan.steps if issubclass(one.gives or object, given))
                changed += [(other, fields) for other in kind]
            changes = {f"{at}.{name}": value for at, one in changed for name, value in one.items()}
            found.append(Saved(saving.order, saving.what, changes))
    return sorted(found, key=lambda one: one.order)
