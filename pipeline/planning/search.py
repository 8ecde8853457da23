"""Ways of a recipe that need less memory, by what its stages say that they can do without."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.errors import StageError
from pipeline.planning.memory_plan import MemoryPlan
from pipeline.planning.planner import NARROW, Planners, Saving

TELLING = 1.1
"""How many times as long as another a step has to be estimated to count as longer: less is within
what estimates were off on real steps."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Of a recipe."""

    path: str
    """`slot`, or `slot.field`."""
    value: Any
    why: str

    @property
    def override(self) -> str:
        """As an argument of commands."""
        return f"{self.path}={json.dumps(self.value)}"


def folded(changes: Sequence[Change]) -> list[Change]:
    """With fields of slots that are changed as a whole said in these."""
    made: dict[str, Change] = {}
    for one in changes:
        slot, _, field = one.path.partition(".")
        if field and slot in made:
            made[slot] = replace(made[slot], value={**made[slot].value, field: one.value})
        else:
            made[one.path] = one
    return list(made.values())


Draw = Callable[[Sequence[Change]], MemoryPlan]
"""Changes -> the plan of the recipe with them. Raises PipeError."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A recipe with changes, and what it would need."""

    changes: Sequence[Change]
    saved: Sequence[Saving]
    """By what, of the changes, in the order in which they were made."""
    drawn: MemoryPlan

    @property
    def fits(self) -> bool:
        """Whether nothing is short."""
        return not self.drawn.short

    def and_(self, slot: str, saving: Saving, draw: Draw) -> Way:
        """With one saving more; of two that set the same field, the later."""
        fields = {slot: saving.fields}
        for step in self.drawn.plan.steps:
            for given, more in saving.beside.items():
                if issubclass(step.gives or object, given):
                    fields[step.slot] = {**fields.get(step.slot, {}), **more}
        new = [
            Change(path=f"{place}.{field}", value=value, why=saving.what)
            for place, values in fields.items()
            for field, value in values.items()
        ]
        made: Mapping[str, Change] = {one.path: one for one in [*self.changes, *new]}
        changes = list(made.values())
        return Way(changes=changes, saved=[*self.saved, saving], drawn=draw(changes))

    @property
    def narrow(self) -> bool:
        """Whether it computes in fewer bits than was asked for."""
        return any(saving.order >= NARROW for saving in self.saved)


def ways(changes: Sequence[Change], draw: Draw) -> Iterator[Way]:
    """The recipe with these changes, with one saving after another until it fits, and then without
    each kind of saving: a later one may have made an earlier one needless, and may cost less time.
    Each is drawn once. Raises PipeError."""
    drawn: dict[tuple[str, ...], MemoryPlan] = {}

    def once(changes: Sequence[Change]) -> MemoryPlan:
        key = tuple(sorted(change.override for change in changes))
        return drawn[key] if key in drawn else drawn.setdefault(key, draw(changes))

    start = Way(changes=changes, saved=(), drawn=once(changes))
    chain = [start, *_spared(start, once, ())]
    yield from chain
    kinds = list(dict.fromkeys(saving.order for saving in chain[-1].saved))
    if chain[-1].fits:
        shown = {id(way.drawn) for way in chain}
        for kind in kinds:
            rest = [way for way in _spared(start, once, [kind]) if id(way.drawn) not in shown]
            shown |= {id(way.drawn) for way in rest}
            yield from rest


def _spared(start: Way, draw: Draw, without: Collection[int]) -> Iterator[Way]:
    """One saving after another, each beside those before it that made the peak lower, until it fits
    or none is left. If none alone does, the first stays: two phases may need as much."""
    way = start
    while _short(way.drawn):
        left = (one for one in savings(way.drawn) if one[1].order not in without)
        tried = []
        for following in _possible(way, left, draw):
            yield following
            tried.append(following)
            if needed(following.drawn) < needed(way.drawn):
                break
        if not tried:
            return
        helps = needed(tried[-1].drawn) < needed(way.drawn)
        way = tried[-1 if helps else 0]


def _possible(way: Way, left: Iterable[tuple[str, Saving]], draw: Draw) -> Iterator[Way]:
    """The way with each of these savings that its stages can do together."""
    for slot, saving in left:
        try:
            following = way.and_(slot, saving, draw)
        except StageError:
            continue
        if following.changes != way.changes:
            yield following


def _short(drawn: MemoryPlan) -> bool:
    """Whether there is too little memory for what a model computes, which savings make less."""
    there = drawn.hardware.host_memory if _on_cpu(drawn) else drawn.hardware.device_memory
    return there is not None and there < needed(drawn)


def needed(drawn: MemoryPlan) -> int:
    """Bytes of the memory that a model is computed in, at the peak."""
    return max(_needs(drawn).values(), default=0)


def _needs(drawn: MemoryPlan) -> dict[str, int]:
    """Phase -> bytes of the memory that a model is computed in."""
    if _on_cpu(drawn):
        return {phase: peak.bytes for phase, peak in drawn.estimate.host.items()}
    of = drawn.margins.of
    return {phase: of(peak.bytes) for phase, peak in drawn.estimate.device.items()}


def _on_cpu(drawn: MemoryPlan) -> bool:
    return drawn.topology.device == "cpu"


def savings(drawn: MemoryPlan) -> list[tuple[str, Saving]]:
    """Slot and change, of all stages that can do with less, the first to be tried first."""
    found = [
        (slot, saving)
        for slot, planner in Planners.installed().of(drawn.plan).items()
        if hasattr(planner, "savings")
        for saving in planner.savings(drawn.topology.ranks)
    ]
    return sorted(found, key=lambda one: one[1].order)


def best(found: Sequence[Way]) -> Way | None:
    """Of those that fit and whose step is not longer than the shortest by what the estimate can
    tell, the first that no other one beats; where the estimate is not known of all that fit, the
    first of these with the fewest savings. None if none fits."""
    able = [way for way in found if way.fits]
    able = [way for way in able if not way.narrow] or able
    times = [way.drawn.time for way in able]
    if not able or not all(time is not None and not time.unknown for time in times):
        return min(able, key=lambda way: len(way.saved), default=None)
    longest = TELLING * min(_seconds(way.drawn) for way in able)
    near = [way for way in able if _seconds(way.drawn) <= longest]
    return next(way for way in near if not any(_beats(other, way) for other in near))


def _beats(one: Way, other: Way) -> bool:
    """Whether it is faster in less memory with fewer savings."""
    faster = _seconds(one.drawn) < _seconds(other.drawn)
    smaller = needed(one.drawn) < needed(other.drawn)
    return faster and smaller and len(one.saved) < len(other.saved)


def _seconds(drawn: MemoryPlan) -> float:
    """Of a step in which nothing overlaps, which is nearer to what is measured."""
    return drawn.time.most if drawn.time is not None else 0.0
