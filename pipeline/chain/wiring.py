"""Wires between slots: a need is met by the slot that `takes` names for it, or by the latest slot
before it that returns its type; what is of one training, by one after the training before."""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic

from pipeline.chain.artifacts import KINDS, OF_ONE, prepares, trains
from pipeline.chain.entry_points import kind_of
from pipeline.chain.registry import Registry
from pipeline.contracts.plan_view import Wiring
from pipeline.contracts.signature import Need, gives, needs
from pipeline.contracts.stage import Durable
from pipeline.errors import PluginError, Problem
from pipeline.recipe.nodes import SourceMap
from pipeline.recipe.shipped import by_use
from pipeline.utils.text import did_you_mean

_NO_ROLE: set[object] = {object, ABC, Durable, Generic}
"""Bases that say nothing about what an artifact is for."""
NEXT = "to train it further, add a slot after it that returns its model (pipe stages model)"


@dataclass(frozen=True, kw_only=True)
class SlotType:
    """A slot with its stage's class; None when that is not known because of another mistake."""

    slot: str
    use: str
    kind: type | None
    takes: Mapping[str, str | None] = field(default_factory=dict)
    """Parameter of `run` -> the slot that the recipe names for it; None leaves it out."""

    @property
    def gives(self) -> type | None:
        return gives(self.kind) if self.kind is not None else None

    @property
    def needs(self) -> tuple[Need, ...]:
        return needs(self.kind) if self.kind is not None else ()


def wired(links: Sequence[SlotType]) -> Wiring:
    """The wires of a recipe. A parameter without a slot before it that can give its type has
    none."""
    found: dict[str, dict[str, str | None]] = {link.slot: {} for link in links}
    for index, link in enumerate(links):
        earlier, inputs = links[:index], found[link.slot]
        for need in link.needs:
            if need.parameter in link.takes:
                able = [one.slot for one in earlier if _meets(one.gives, need)]
                asked = link.takes[need.parameter]
                inputs[need.parameter] = asked if asked in able else None
            elif link.kind is not None:
                later = links[index + 1 :]
                inputs[need.parameter] = _producer(need, link.kind, earlier, later)
    return Wiring(kinds={link.slot: link.kind for link in links}, inputs=found)


def wrong_takes(links: Sequence[SlotType], places: SourceMap) -> Iterator[Problem]:
    """A problem for every name in `takes` that is not a parameter, or no slot that can give it."""
    for index, link in enumerate(links):
        wanted = {need.parameter: need for need in link.needs}
        for parameter, slot in link.takes.items() if link.kind else ():
            path = ("stages", link.slot, "takes", parameter)
            if parameter in wanted:
                message, hint = _no_giver(wanted[parameter], slot, links, index, places)
                place = places.value(path)
            else:
                message, place = f"`{link.use}` takes no `{parameter}`", places.key(path)
                hint = did_you_mean(parameter, wanted) or "leave it out"
            if message:
                key = f"{link.slot}.takes.{parameter}"
                yield Problem(message=message, key=key, hint=hint, location=place)


def _no_giver(
    need: Need, slot: str | None, links: Sequence[SlotType], index: int, places: SourceMap
) -> tuple[str, str]:
    """Message and hint about the slot that is named for a need; empty if it returns that."""
    link, wanted = links[index], f"{need.parameter} ({need.type.__name__})"
    able = [one.slot for one in links[:index] if _meets(one.gives, need)]
    hint = f"slots before it that return one: {', '.join(able)}" if able else ""
    named = next((one for one in links if one.slot == slot), None)
    if slot in able or (slot is None and need.optional) or (named and named.kind is None):
        return "", ""
    if slot is None:
        return f"`{link.use}` needs its {wanted}", hint
    if named is None:
        return f"there is no slot `{slot}`", did_you_mean(slot, able)
    if not _meets(named.gives, need):
        given = named.gives.__name__ if named.gives is not None else "nothing"
        message = f"slot `{slot}` ({named.use}) returns {given}, not the {wanted} of `{link.use}`"
        return message, hint
    if named is link:
        return "a slot cannot take its own result", hint
    place = places.key(("stages", slot))
    message = f"slot `{slot}` comes after this one"
    return message, f"move slot `{slot}` ({place}) before `{link.slot}`"


def missing_inputs(
    links: Sequence[SlotType], registry: Registry, places: SourceMap
) -> list[Problem]:
    """A problem for every need that no earlier slot meets."""
    problems = []
    absent: set[type] = set()  # a slot that several need is missing once
    for index, link in enumerate(links):
        earlier, later = links[:index], links[index + 1 :]
        if link.kind is None or any(other.kind is None for other in earlier):
            continue
        for need in needs(link.kind):
            told = need.type in absent or need.parameter in link.takes
            if need.optional or told or _producer(need, link.kind, earlier, later) is not None:
                continue
            candidates = [*_open(need, link.kind, earlier, later), link, *later]
            if not any(_alike(other.gives, need.type) for other in candidates):
                absent.add(need.type)
            problems.append(_missing(need, links, index, registry, places))
    return problems


def unread_results(links: Sequence[SlotType], wiring: Wiring, places: SourceMap) -> list[Problem]:
    """A mistake for every result that no slot reads though another slot returns such a result too,
    or an earlier slot could have read it; and otherwise a warning, in a chain that leads to a
    result that lasts. Those may be read by no one: they are what a run is for."""
    if any(link.kind is None for link in links):
        return []
    read = {slot for inputs in wiring.inputs.values() for slot in inputs.values()}
    leads = any(_lasts(link) for link in links)
    last = next((one.slot for one in reversed(links) if trains(one.kind)), None)
    problems = []
    for index, link in enumerate(links):
        own = wiring.inputs[link.slot].values()
        if trains(link.kind) and link.slot not in {*read, last}:
            problems.append(_unread(link, None, places, NEXT))
        if link.gives is None or _lasts(link) or link.slot in read:
            continue
        alike = [o for o in links if o is not link and _alike(o.gives, link.gives)]
        other = next((o for o in alike if o.slot in read), None)
        readers = (o for o in links[:index] if any(_meets(link.gives, need) for need in o.needs))
        reader = next(readers, None) if not alike else None
        if reader is not None:
            problems.append(_late(link, reader, places))
            continue
        # a chain may end, unfinished, with a slot that changes what it takes
        if leads or (other is not None and other.slot not in own):
            problems.append(_unread(link, other, places))
    return problems


def _lasts(link: SlotType) -> bool:
    return link.gives is not None and issubclass(link.gives, Durable)


def _late(link: SlotType, reader: SlotType, places: SourceMap) -> Problem:
    place = places.value(("stages", reader.slot, "use"))
    return Problem(
        message=f"no slot reads its result: slot `{reader.slot}` ({reader.use}, {place}) comes "
        "before it",
        key=f"{link.slot}.use",
        hint=f"move it before slot `{reader.slot}`",
        location=places.value(("stages", link.slot, "use")),
    )


def _unread(
    link: SlotType, other: SlotType | None, places: SourceMap, hint: str = "remove the slot"
) -> Problem:
    message = "no slot reads its result"
    if other is not None and other.gives is not None:
        place = places.value(("stages", other.slot, "use"))
        message += f": slot `{other.slot}` ({other.use}, {place}) has such a result too"
        hint = (
            f"remove one of the two (`{link.slot}: null` or `{other.slot}: null`), or have it "
            "stand before the slot that is to read it"
        )
    location = places.value(("stages", link.slot, "use"))
    return Problem(
        message=message, key=f"{link.slot}.use", hint=hint, location=location, warning=other is None
    )


def position(kind: type, links: Sequence[SlotType]) -> str:
    """Return where a slot of this class can be added: after the first slots that meet its needs,
    or before the first that needs its result; empty if any place will do."""
    for index in range(1, len(links) + 1):
        required = [need for need in needs(kind) if not need.optional]
        if required and all(_producer(need, kind, links[:index]) is not None for need in required):
            return f"after `{links[index - 1].slot}`"
    for link in links:
        if any(_meets(gives(kind), need) for need in link.needs):
            return f"before `{link.slot}`"
    return ""


def _producer(
    need: Need, kind: type, earlier: Sequence[SlotType], later: Sequence[SlotType] = ()
) -> str | None:
    """The latest slot that returns what is needed; None where one would whose stage is not
    known."""
    for link in reversed(_open(need, kind, earlier, later)):
        if link.kind is None and issubclass(KINDS.get(kind_of(link.use), object), need.type):
            return None
        if _meets(link.gives, need):
            return link.slot
    return None


def _open(
    need: Need, kind: type, earlier: Sequence[SlotType], later: Sequence[SlotType]
) -> Sequence[SlotType]:
    """The slots whose results a stage gets unless `takes` says otherwise: for a further training,
    what is of one training ends with it."""
    further = prepares(kind) and (trains(kind) or any(trains(one.kind) for one in later))
    if not (further and issubclass(need.type, OF_ONE)):
        return earlier
    return earlier[max((n for n, one in enumerate(earlier, 1) if trains(one.kind)), default=0) :]


def _meets(given: type | None, need: Need) -> bool:
    return given is not None and issubclass(given, need.type)


def _missing(
    need: Need, links: Sequence[SlotType], index: int, registry: Registry, places: SourceMap
) -> Problem:
    link, earlier = links[index], links[:index]
    assert link.kind is not None
    known = _open(need, link.kind, earlier, links[index + 1 :])
    ended = [one for one in earlier[: len(earlier) - len(known)] if trains(one.kind)]
    later = next((other for other in links[index + 1 :] if _meets(other.gives, need)), None)
    alike = next((other for other in reversed(known) if _alike(other.gives, need.type)), None)
    message = f"`{link.use}` needs"
    if later is not None:
        message += f" the result of slot `{later.slot}`, which comes after it"
        place = places.key(("stages", later.slot))
        hint = f"move slot `{later.slot}` ({place}) before `{link.slot}`"
    elif alike is not None and alike.gives is not None:
        message = f"`{link.use}` cannot use the result of slot `{alike.slot}` ({alike.use})"
        hint = _exchange(need, link, alike, earlier, registry)
    else:
        givers = _givers(need, registry)
        rest = links[index:]
        fitting = [name for name in givers if _fits(registry.load(name), earlier, rest)] or givers
        kinds = " or ".join(f"`{kind}`" for kind in dict.fromkeys(map(kind_of, fitting)))
        message += f" a slot {kinds} before it" if kinds else f" {need.type.__name__}"
        if ended:
            message += f" and after slot `{ended[-1].slot}`: each training takes its own"
        hint = _to_add(by_use(fitting), link, links) if fitting else "no installed stage returns it"
    location = places.value(("stages", link.slot, "use"))
    return Problem(message=message, key=f"{link.slot}.use", hint=hint, location=location)


def _to_add(stages: Sequence[str], before: SlotType, links: Sequence[SlotType]) -> str:
    """The slot to add, and other stages that it can have."""
    first, *others = stages
    rest = f", or {', '.join(others)}" if others else ""
    taken, kind = {link.slot for link in links}, kind_of(first)
    names = itertools.chain([kind], (f"{kind}{number}" for number in itertools.count(2)))
    name = next(one for one in names if one not in taken)
    return f"add `{name}: {{use: {first}}}` before slot `{before.slot}`{rest}"


def _alike(given: type | None, wanted: type) -> bool:
    """Whether both are for the same role: they share a base that means something."""
    return given is not None and bool(set(given.__mro__) & set(wanted.__mro__) - _NO_ROLE)


def _exchange(
    need: Need, link: SlotType, alike: SlotType, earlier: Sequence[SlotType], registry: Registry
) -> str:
    here = [
        name
        for name, kind in _loaded(registry).items()
        if kind_of(name) == kind_of(link.use) and name != link.use and _fits(kind, earlier)
    ]
    there = _givers(need, registry)
    parts = [f"`{link.slot}` can be {' or '.join(here)}"] if here else []
    parts += [f"`{alike.slot}` can be {' or '.join(there)}"] if there else []
    return ", or ".join(parts)


def _fits(kind: type, earlier: Sequence[SlotType], later: Sequence[SlotType] = ()) -> bool:
    return all(
        need.optional or _producer(need, kind, earlier, later) is not None for need in needs(kind)
    )


def _givers(need: Need, registry: Registry) -> list[str]:
    return [name for name, kind in _loaded(registry).items() if _meets(gives(kind), need)]


def _loaded(registry: Registry) -> Mapping[str, type]:
    """The installed stages that load."""
    found = {}
    for name in registry.names():
        with contextlib.suppress(PluginError):
            found[name] = registry.load(name)
    return found
