"""Search for changes of a recipe with which it fits: the memory savings that its stages offer.

All savings that only cost time are applied first. If that does not fit, one saving that changes
numerics is added. Then each saving without which the recipe fits is removed, the most expensive
first.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.chain.plan import Plan
from pipeline.chain.registry import Registry
from pipeline.errors import RecipeError, StageError
from pipeline.planning.hardware import HardwareOptions, Margins
from pipeline.planning.memory_plan import MemoryPlan, check, estimate_plan
from pipeline.planning.planner import AWAY, Planners
from pipeline.planning.presets import Strategy
from pipeline.planning.report import memory

LONGER = 1.1
"""Ratio up to which two step times count as equal: estimates of real steps were off by as much."""

Changes = Mapping[str, Any]
"""Changed values of a recipe by `slot` or `slot.field`."""


def overrides(changes: Changes) -> list[str]:
    """The changes as arguments of a command."""
    return [f"{path}={json.dumps(value)}" for path, value in changes.items()]


@dataclass(frozen=True, kw_only=True)
class SearchBase:
    """A recipe on given machines, whose plans with changes are compared."""

    recipe: Path
    overrides: Sequence[str] = ()
    machines: HardwareOptions
    margins: Margins
    registry: Registry
    options: Sequence[str] = ()
    """Options that name these machines, if they are not those of the command."""
    cannot: set[int] = field(default_factory=set)
    """Orders of savings that the model turned out not to support."""
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


OWN = Strategy(name="", use="")
"""The recipe's own strategy."""


class AppliedSaving(NamedTuple):
    """A saving as changes of a recipe."""

    order: int
    what: str
    changes: Changes


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A recipe with savings, possibly under another strategy."""

    base: SearchBase
    start: Changes
    """Changes besides the savings."""
    saved: Sequence[AppliedSaving] = ()
    strategy: Strategy = OWN

    @property
    def saving(self) -> Changes:
        """Changes of all savings; a later one wins over an earlier one of the same field."""
        return {path: value for one in self.saved for path, value in one.changes.items()}

    @property
    def changes(self) -> Changes:
        """All changes; those of fields go into the new slot where a whole slot is replaced."""
        made = dict(self.start)
        for path, value in self.saving.items():
            slot, _, name = path.partition(".")
            made |= {slot: {**made[slot], name: value}} if slot in made else {path: value}
        return made

    @property
    def memory_plan(self) -> MemoryPlan:
        """The changed recipe's memory plan. Raises PipeError."""
        return self.base.memory_plan(self.changes)

    @property
    def fits(self) -> bool:
        """Whether neither device nor host memory is short."""
        return not self.memory_plan.short

    @property
    def roomy(self) -> bool:
        """Whether it fits with the head-room that advice leaves."""
        return self.memory_plan.roomy

    @property
    def narrow(self) -> int:
        """Largest order of the savings that change numerics; 0 without one."""
        return max((one.order for one in self.saved if one.order > AWAY), default=0)

    def without(self, saved: AppliedSaving) -> Candidate:
        """The candidate without one of its savings."""
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


def most_saving(
    base: SearchBase, start: Changes, *, away: bool = True, narrow: bool = True
) -> Candidate:
    """Apply every saving that only costs time and, if that does not fit, with `away` what waits in
    host memory, and with `narrow` one that changes numerics. Raises RecipeError for changes `start`
    that the recipe does not accept, and StageError and UsageError as planning does."""
    every = [one for one in _savings(base, start) if one.order not in base.cannot]
    slower = [one for one in every if one.order < AWAY]
    host = [one for one in every if away and one.order == AWAY]
    narrower = [[one] for one in every if narrow and one.order > AWAY]
    # What waits in host memory may be too much for the host, so all is tried without it first.
    hosts = [[], host] if host else [[]]
    for more in [*hosts, *([*some, *one] for one in narrower for some in hosts)]:
        candidate = _possible(Candidate(base=base, start=start, saved=[*slower, *more]))
        if candidate.fits:
            break
    return candidate


def relaxed(candidate: Candidate) -> Candidate:
    """Remove each saving that saves nothing, or without which the candidate still fits with
    head-room; one without that keeps all that only cost time."""
    for one in reversed(candidate.saved if candidate.fits else ()):
        less = candidate.without(one)
        optional = less.roomy if candidate.roomy or one.order < AWAY else less.fits
        mine, its = less.memory_plan, candidate.memory_plan
        no_more = mine.needed <= its.needed and mine.estimate.host_peak <= its.estimate.host_peak
        optional = optional or no_more
        candidate = less if optional else candidate
    return candidate


def best(found: Sequence[Candidate]) -> Candidate | None:
    """A candidate that fits, or None: one of those that change numerics the least, then of those
    with head-room, then of those that no other is faster and smaller than, and whose expected step
    is within `LONGER` of the shortest (if all are known), then the one with the fewest savings;
    among equals, the first."""
    able = [one for one in found if one.fits]
    able = [one for one in able if one.narrow == min(other.narrow for other in able)]
    able = [one for one in able if one.roomy] or able
    if able and not any(one.memory_plan.time.unknown for one in able):
        able = [one for one in able if not any(_beats(other, one) for other in able)]
        longest = LONGER * min(one.memory_plan.time.expected for one in able)
        able = [one for one in able if one.memory_plan.time.expected <= longest]
    return min(able, key=lambda one: len(one.saved), default=None)


def _beats(one: Candidate, other: Candidate) -> bool:
    """Whether a candidate is as fast as another, and smaller."""
    mine, its = one.memory_plan, other.memory_plan
    return mine.time.expected <= its.time.expected and mine.needed < its.needed


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


def _savings(base: SearchBase, start: Changes) -> list[AppliedSaving]:
    """All savings that the recipe accepts together, in order."""
    plan, saved, seen = base.checked(start), list[AppliedSaving](), list[AppliedSaving]()
    while left := [one for one in _offered(plan) if one not in seen]:
        seen.append(left[0])
        more = Candidate(base=base, start=start, saved=[*saved, left[0]])
        with contextlib.suppress(RecipeError):
            plan = base.checked(more.changes)
            saved.append(left[0])
    return saved


def _offered(plan: Plan) -> list[AppliedSaving]:
    """Savings that the planners of all slots offer, in order."""
    found = []
    for slot, planner in Planners.installed().of(plan).items():
        for saving in planner.savings(plan.view.data_ranks(planner.stage)):
            if saving.order == AWAY and plan.view.device == "cpu":
                continue  # the host is the device
            changed = [(slot, saving.fields)]
            for given, fields in saving.beside.items():
                kind = (one.slot for one in plan.steps if issubclass(one.gives or object, given))
                changed += [(other, fields) for other in kind]
            changes = {f"{at}.{name}": value for at, one in changed for name, value in one.items()}
            found.append(AppliedSaving(saving.order, saving.what, changes))
    return sorted(found, key=lambda one: one.order)
