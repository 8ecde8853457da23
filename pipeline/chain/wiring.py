"""Wires between slots: a need is met by the slot that `takes` names for it, or by the latest slot
before it that returns its type; what is of one training, by one after the training before."""

from __future__ import annotations

import itertools
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic

from pipeline.chain.artifacts import KINDS, OF_ONE, prepares, trains
from pipeline.chain.registry import Registry, kind_of
from pipeline.contracts.plan_view import Wiring
from pipeline.contracts.signature import Need, gives, needs
from pipeline.contracts.stage import Durable
from pipeline.errors import Problem
from pipeline.recipe.includes import by_use
from pipeline.recipe.nodes import Node
from pipeline.utils.text import did_you_mean

NO_ROLE: set[object] = {object, ABC, Durable, Generic}
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

    def meets(self, need: Need) -> bool:
        return self.gives is not None and issubclass(self.gives, need.type)

    def same_role(self, wanted: type) -> bool:
        """Whether its result has the same role: both share a base that means something."""
        return bool(set((self.gives or object).__mro__) & set(wanted.__mro__) - NO_ROLE)


def wired(links: Sequence[SlotType]) -> Wiring:
    """The wires of a recipe. A parameter that no slot before it can serve has none."""
    found: dict[str, dict[str, str | None]] = {link.slot: {} for link in links}
    for index, link in enumerate(links):
        earlier = links[:index]
        for need in link.needs:
            asked = link.takes.get(need.parameter)
            able = (one.slot for one in earlier if one.slot == asked and one.meets(need))
            giver = next(able, None)
            if need.parameter not in link.takes:
                giver = _producer(need, link.kind, earlier, links[index + 1 :])
            found[link.slot][need.parameter] = giver
    return Wiring(kinds={link.slot: link.kind for link in links}, inputs=found)


def wrong_takes(links: Sequence[SlotType], tree: Node) -> Iterator[Problem]:
    """A problem for every name in `takes` that is not a parameter, or no slot that can give it."""
    for index, link in enumerate(links):
        wanted = {need.parameter: need for need in link.needs}
        for parameter, slot in link.takes.items() if link.kind else ():
            path = ("stages", link.slot, "takes", parameter)
            message = f"`{link.use}` takes no `{parameter}`"
            hint = did_you_mean(parameter, wanted) or "leave it out"
            if parameter in wanted:
                message, hint = _wrong_giver(wanted[parameter], slot, links, index, tree)
            if message:
                yield tree.problem(path, message, hint, at_key=parameter not in wanted)


def _wrong_giver(
    need: Need, slot: str | None, links: Sequence[SlotType], index: int, tree: Node
) -> tuple[str, str]:
    """Message and hint about the slot that is named for a need; empty if it returns that."""
    link, wanted = links[index], f"{need.parameter} ({need.type.__name__})"
    able = [one.slot for one in links[:index] if one.meets(need)]
    hint = f"slots before it that return one: {', '.join(able)}" if able else ""
    named = next((one for one in links if one.slot == slot), None)
    if slot in able or (slot is None and need.optional) or (named and named.kind is None):
        return "", ""
    if slot is None:
        return f"`{link.use}` needs its {wanted}", hint
    if named is None:
        return f"there is no slot `{slot}`", did_you_mean(slot, able)
    if not named.meets(need):
        given = named.gives.__name__ if named.gives is not None else "nothing"
        message = f"slot `{slot}` ({named.use}) returns {given}, not the {wanted} of `{link.use}`"
        return message, hint
    if named is link:
        return "a slot cannot take its own result", hint
    hint = f"move slot `{slot}` ({tree.key_place(('stages', slot))}) before `{link.slot}`"
    return f"slot `{slot}` comes after this one", hint


def missing_inputs(links: Sequence[SlotType], registry: Registry, tree: Node) -> list[Problem]:
    """A problem for every need that no earlier slot meets."""
    problems = []
    absent: set[type] = set()  # a slot that several need is missing once
    for index, link in enumerate(links):
        earlier, later = links[:index], links[index + 1 :]
        if any(other.kind is None for other in earlier):
            break
        for need in link.needs:
            known = need.optional or need.type in absent or need.parameter in link.takes
            if known or _producer(need, link.kind, earlier, later) is not None:
                continue
            candidates = [*_visible(need, link.kind, earlier, later), link, *later]
            if not any(other.same_role(need.type) for other in candidates):
                absent.add(need.type)
            problems.append(_missing(need, links, index, registry, tree))
    return problems


def _missing(
    need: Need, links: Sequence[SlotType], index: int, registry: Registry, tree: Node
) -> Problem:
    """The problem of a need that is not met: move a slot, use other stages, or add a slot."""
    link, earlier, later = links[index], links[:index], links[index + 1 :]
    message = f"`{link.use}` needs"
    if after := next((other for other in later if other.meets(need)), None):
        message += f" the result of slot `{after.slot}`, which comes after it"
        place = tree.key_place(("stages", after.slot))
        return _at_use(
            link, tree, message, f"move slot `{after.slot}` ({place}) before `{link.slot}`"
        )
    known = _visible(need, link.kind, earlier, later)
    every = ((name, registry.find(name)) for name in registry.names())
    stages = {name: kind for name, kind in every if kind is not None}
    types = [SlotType(slot="", use=name, kind=kind) for name, kind in stages.items()]
    givers = [one.use for one in types if one.meets(need)]
    if alike := next((other for other in reversed(known) if other.same_role(need.type)), None):
        message = f"`{link.use}` cannot use the result of slot `{alike.slot}` ({alike.use})"
        kind = kind_of(link.use)
        others = [name for name in registry.names(kind) if name in stages and name != link.use]
        here = [name for name in others if _fits(stages[name], earlier)]
        options = {link.slot: here, alike.slot: givers}
        can_be = (f"`{slot}` can be {' or '.join(uses)}" for slot, uses in options.items() if uses)
        return _at_use(link, tree, message, ", or ".join(can_be))
    fitting = [name for name in givers if _fits(stages[name], earlier, links[index:])] or givers
    kinds = " or ".join(f"`{kind}`" for kind in dict.fromkeys(map(kind_of, fitting)))
    message += f" a slot {kinds} before it" if kinds else f" {need.type.__name__}"
    if ended := [one for one in earlier[: len(earlier) - len(known)] if trains(one.kind)]:
        message += f" and after slot `{ended[-1].slot}`: each training takes its own"
    if not fitting:
        return _at_use(link, tree, message, "no installed stage returns it")
    first, *others = by_use(fitting)
    taken, kind = {one.slot for one in links}, kind_of(first)
    numbered = (f"{kind}{number}" for number in itertools.count(2))
    name = next(one for one in itertools.chain([kind], numbered) if one not in taken)
    rest = f", or {', '.join(others)}" if others else ""
    hint = f"add `{name}: {{use: {first}}}` before slot `{link.slot}`{rest}"
    return _at_use(link, tree, message, hint)


def unread_results(links: Sequence[SlotType], wiring: Wiring, tree: Node) -> Iterator[Problem]:
    """A mistake for every result that no slot reads though another slot returns such a result too,
    or an earlier slot could have read it; and otherwise a warning, in a chain that leads to a
    result that lasts. Those may be read by no one: they are what a run is for."""
    if any(link.kind is None for link in links):
        return
    read = {slot for inputs in wiring.inputs.values() for slot in inputs.values()}
    lasting = {one.slot for one in links if issubclass(one.gives or object, Durable)}
    last = next((one.slot for one in reversed(links) if trains(one.kind)), None)
    message = "no slot reads its result"
    for index, link in enumerate(links):
        if trains(link.kind) and link.slot not in {*read, last}:
            yield _at_use(link, tree, message, NEXT, warning=True)
        if link.gives is None or link.slot in lasting or link.slot in read:
            continue
        alike = [one for one in links if one is not link and one.same_role(link.gives)]
        other = next((one for one in alike if one.slot in read), None)
        readers = (one for one in links[:index] if any(map(link.meets, one.needs)))
        if not alike and (reader := next(readers, None)):
            why = f"slot {_named(reader, tree)} comes before it"
            yield _at_use(link, tree, f"{message}: {why}", f"move it before slot `{reader.slot}`")
        # a chain may end, unfinished, with a slot that changes what it takes
        elif other is None and lasting:
            yield _at_use(link, tree, message, "remove the slot", warning=True)
        elif other is not None and (lasting or other.slot not in wiring.inputs[link.slot].values()):
            hint = f"remove one of the two (`{link.slot}: null` or `{other.slot}: null`), or have "
            hint += "it stand before the slot that is to read it"
            why = f"slot {_named(other, tree)} has such a result too"
            yield _at_use(link, tree, f"{message}: {why}", hint)


def _named(link: SlotType, tree: Node) -> str:
    return f"`{link.slot}` ({link.use}, {tree.place(('stages', link.slot, 'use'))})"


def _at_use(
    link: SlotType, tree: Node, message: str, hint: str, *, warning: bool = False
) -> Problem:
    """A problem of a slot as a whole."""
    return tree.problem(("stages", link.slot, "use"), message, hint, warning=warning)


def position(kind: type, links: Sequence[SlotType]) -> str:
    """Return where a slot of this class can be added: after the first slots that meet its needs,
    or before the first that needs its result; empty if any place will do."""
    required = [need for need in needs(kind) if not need.optional]
    for index, link in enumerate(links):
        if required and _fits(kind, links[: index + 1]):
            return f"after `{link.slot}`"
    own = SlotType(slot="", use="", kind=kind)
    readers = (link.slot for link in links if any(map(own.meets, link.needs)))
    return next((f"before `{slot}`" for slot in readers), "")


def _fits(kind: type, earlier: Sequence[SlotType], later: Sequence[SlotType] = ()) -> bool:
    """Whether earlier slots meet all that a stage needs."""
    return all(
        need.optional or _producer(need, kind, earlier, later) is not None for need in needs(kind)
    )


def _producer(
    need: Need, kind: type | None, earlier: Sequence[SlotType], later: Sequence[SlotType]
) -> str | None:
    """The latest slot that returns what is needed; None after one that may, of an unknown stage."""
    for link in reversed(_visible(need, kind, earlier, later)):
        if link.kind is None and issubclass(KINDS.get(kind_of(link.use), object), need.type):
            return None
        if link.meets(need):
            return link.slot
    return None


def _visible(
    need: Need, kind: type | None, earlier: Sequence[SlotType], later: Sequence[SlotType]
) -> Sequence[SlotType]:
    """The slots whose results a stage gets unless `takes` says otherwise: for a further training,
    what is of one training ends with it."""
    further = trains(kind) or (prepares(kind) and any(trains(one.kind) for one in later))
    if not (further and issubclass(need.type, OF_ONE)):
        return earlier
    return earlier[max((n for n, one in enumerate(earlier, 1) if trains(one.kind)), default=0) :]
