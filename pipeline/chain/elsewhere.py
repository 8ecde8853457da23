"""Keys that are unknown where they stand: the slot or the stage where they belong."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.chain.registry import Registry, kind_of
from pipeline.chain.wiring import SlotType, position
from pipeline.errors import PluginError, Problem
from pipeline.recipe import Recipe
from pipeline.recipe.dump import inline
from pipeline.recipe.field_errors import fits, owner_of
from pipeline.recipe.fields import adapter, build
from pipeline.recipe.includes import by_use
from pipeline.recipe.load import HEADER_KEYS, RecipeSettings
from pipeline.recipe.nodes import MissingKey, NoSlot, UnknownKey

LONGEST = 90
"""Most characters of a value in a hint."""


class Spot(NamedTuple):
    """A slot and a field of it; `slot` is empty for a key at the top of a recipe."""

    slot: str
    field: str

    @property
    def key(self) -> str:
        return f"{self.slot}.{self.field}" if self.slot else self.field


class Slots:
    """The slots of a recipe, and the fields of the installed stages."""

    def __init__(self, recipe: Recipe, registry: Registry) -> None:
        self.registry = registry
        self.uses = recipe.uses
        self.values = {slot: spec.fields for slot, spec in recipe.stages.items()}

    def with_field(self, field: str) -> list[str]:
        """The slots of the recipe whose stages have a field."""
        return [slot for slot, use in self.uses.items() if field in self.registry.fields(use)]

    def stages_with(self, field: str, kind: str = "") -> str:
        """A hint that names the stages (of one kind, if given) that have a field."""
        names = [use for use in self.registry.names(kind) if field in self.registry.fields(use)]
        return f"`{field}` is a field of {' and '.join(names)}" if names else ""

    def usual(self, slot: str) -> str:
        """The stage of a slot; the one that most recipes use for a slot that the recipe lacks."""
        return self.uses.get(slot) or next(iter(by_use(self.registry.names(slot))), "")

    def added(self, slot: str, fields: Mapping[str, Any]) -> str:
        """A slot that the recipe lacks, as YAML, and its position. `fields` have dotted names."""
        content: dict[str, Any] = {"use": self.usual(slot)}
        for name, value in fields.items():
            *blocks, field = name.split(".")
            reduce(lambda inner, block: inner.setdefault(block, {}), blocks, content)[field] = value
        text = f"a slot `{slot}: {shortened(content)}`"
        kind = self.registry.find(content["use"])
        links = [
            SlotType(slot=other, use=use, kind=self.registry.find(use))
            for other, use in self.uses.items()
        ]
        return f"{text} {position(kind, links)}".rstrip() if kind is not None else text


class Meant(NamedTuple):
    """The meaning of an unknown key in another program."""

    hint: str = ""
    """What to do about it; empty where `to` says it, or nothing does."""
    to: Mapping[str, Any] = {}
    """Recipe key -> value that is meant; slots have the names of their stages' kinds."""
    sure: bool = False
    """Whether the hint holds also where another slot has a field of the key's name."""


Foreign = Callable[[Sequence[UnknownKey], Slots], Sequence[Meant]]
"""Knows keys of other programs: returns what each of a recipe's unknown keys means there."""
Hint = tuple[str, Spot | None]
"""A hint, and the field that is meant if it is one of the same slot."""
Places = Sequence[tuple[Spot, Any]]
"""Fields, and the value of each."""


def explained(
    problems: Sequence[Problem], recipe: Recipe, registry: Registry, foreign: Foreign | None = None
) -> list[Problem]:
    """Return the problems with better hints for unknown keys. A field that is missing because its
    name is the unknown one is not reported separately."""
    slots = Slots(recipe, registry)
    every = [one for problem in problems for one in _about_slots(problem, slots, recipe, foreign)]
    unknown = [one for one in every if isinstance(one, UnknownKey)]
    elsewhere, found, meant = read_elsewhere(unknown, slots, foreign), [], set()
    for problem in every:
        if isinstance(problem, UnknownKey):
            there, sure = next(elsewhere)
            with contextlib.suppress(PluginError):
                hint, spot = there if sure else _hint(problem, slots, there)
                meant |= {spot.key} if spot else set()
                problem = replace(problem, hint=hint) if hint else problem
        found.append(problem)
    return [one for one in found if not (isinstance(one, MissingKey) and one.key in meant)]


def read_elsewhere(
    unknown: Sequence[UnknownKey], slots: Slots, foreign: Foreign | None
) -> Iterator[tuple[Hint, bool]]:
    """Yield for each key what it means in other programs, and whether that is sure."""
    found = foreign(unknown, slots) if foreign and unknown else [Meant()] * len(unknown)
    places: list[list[tuple[Spot, Any]]] = []
    for each, meant in zip(unknown, found, strict=True):
        places.append([])
        for key, new in meant.to.items():
            same = isinstance(new, bool) == isinstance(each.value, bool) and new == each.value
            slot, field = key.split(".", 1) if "." in key else ("", key)
            if slot not in ("", *HEADER_KEYS):
                slot = next((one for one, use in slots.uses.items() if kind_of(use) == slot), slot)
            value = each.value if same else new  # 2 as it was written, not 2.0
            places[-1].append((Spot(slot=slot, field=field), value))
    every = [place for own in places for place in own]
    for each, meant, own in zip(unknown, found, places, strict=True):
        said = (meant.hint, None) if meant.hint or not own else _placed(own, every, each, slots)
        yield said, meant.sure


def _about_slots(
    problem: Problem, slots: Slots, recipe: Recipe, foreign: Foreign | None
) -> Iterator[Problem]:
    """The problem, with a better hint if it is of a slot as a whole. A slot without `use` has the
    fields of the stage that it seems to name."""
    known = slots.registry
    if isinstance(problem, MissingKey) and problem.key.endswith(".use"):
        slot = problem.key.removesuffix(".use")
        values = [(field, one) for field, one in slots.values[slot].items() if isinstance(one, str)]
        named = next(((field, use) for field, use in values if use in known), None)
        use = named[1] if named else slots.usual(slot)
        if not use and foreign is not None:  # `lora:` and `peft:`
            to = foreign([UnknownKey(message="", path=(slot,), value=True)], slots)[0].to
            use = next((value for key, value in to.items() if key.endswith(".use")), "")
        hint = f"add `use: {use or f'{slot}.name'}`, the stage's name; `pipe stages` lists all"
        hint = f"write `use: {use}` for `{named[0]}: {use}`" if named else hint
        slots.uses[slot] = use
        yield replace(problem, hint=hint)
        if (kind := known.find(use)) is not None:
            # only keys that no stage of this kind has
            fields = {name for one in known.names(kind_of(use)) for name in known.fields(one)}
            given, path = slots.values[slot], ("stages", slot)
            with contextlib.suppress(PluginError):
                wrong = build(kind, given, tree=recipe.tree, path=path)[1]
                yield from (o for o in wrong if isinstance(o, UnknownKey) and o.name not in fields)
    elif (
        isinstance(problem, NoSlot)
        and not known.names(problem.name)
        and (owners := slots.with_field(problem.name))
    ):
        hint = f"`{problem.name}` is a field of slot `{owners[0]}`: indent it as the others"
        yield replace(problem, hint=hint)
    else:
        yield problem


def _hint(unknown: UnknownKey, slots: Slots, there: Hint) -> Hint:
    """Return the hint, which other programs know if `there` is not empty."""
    path, slot, name = unknown.path, unknown.slot, unknown.name
    if unknown.on_command_line and path[0] not in (*HEADER_KEYS, "stages", *slots.uses):
        absent, *rest = map(str, path)
        fields: Any = {".".join(rest): unknown.value} if rest else unknown.value
        if isinstance(fields, str) and fields in slots.registry:
            fields = {"use": fields}
        if isinstance(fields, dict) and slots.registry.names(absent):
            added = slots.added(absent, fields)
            return f"an override cannot add a slot: add to the recipe {added}", None
        if rest:
            return "", None
    if len(path) == 1 and isinstance(unknown.value, dict):
        return "", Spot("", unknown.closest)
    if len(path) > 1 and len(path) != (2 if path[0] in HEADER_KEYS else 3):
        return "", None
    here = slots.uses.get(slot, "")
    hint = _other_slot(unknown, slots) or (here and slots.stages_with(name, kind_of(here)))
    if hint:
        return hint, None
    hint, spot = there[0] or slots.stages_with(name), there[1]
    if not hint and (unknown.closest in slots.registry.fields(here) or not slot):
        spot = Spot(slot, unknown.closest)
    return hint, spot


def _other_slot(unknown: UnknownKey, slots: Slots) -> str:
    """The hint for a key of the recipe's top, of a block there, or of other slots."""
    name, slot = unknown.name, unknown.slot
    if name in HEADER_KEYS and slot:
        return f"`{name}` stands at the top of a recipe, not in a slot"
    block = next((one for one in HEADER_KEYS if owner_of(RecipeSettings, (one, name))), "")
    in_block = bool(block) and slot != block and len(unknown.path) != 2
    owners = [block] if in_block else [one for one in slots.with_field(name) if one != slot]
    if not owners:
        return ""
    if unknown.on_command_line:
        return f"write {' or '.join(override(f'{one}.{name}', unknown.value) for one in owners)}"
    named = " or ".join(f"`{one}`" for one in owners)
    return f"`{name}` belongs to {named if in_block else f'slot {named}'}"


def override(key: str, value: Any) -> str:
    """An override, quoted where a shell would tear it."""
    text = f"{key}={shortened(value)}"
    if "'" in text and not set('"$`!\\').intersection(text):
        return f'"{text}"'
    return shlex.quote(text)


def shortened(value: Any) -> str:
    """A value for a hint, as people write it."""
    here = f"{Path.cwd()}/"
    if isinstance(value, str) and value.startswith(here):
        value = f"./{value.removeprefix(here)}"
    text = inline(value)
    return text if len(text) <= LONGEST else "..."


def _placed(places: Places, every: Places, unknown: UnknownKey, slots: Slots) -> Hint:
    """Return the hint to write values at their places; only the names of fields that cannot have
    them. A slot that the recipe lacks gets its fields of `every` place."""
    spots = [spot for spot, _ in places]
    if lost := [spot for spot in spots if _owner(spot, slots) is None]:
        field, kind = lost[0].field.partition(".")[0], kind_of(lost[0].slot)
        return slots.stages_with(field, kind), None
    own = next((spot for spot in spots if spot.slot == unknown.slot), None)
    if not all(_takes(spot, new, slots) for spot, new in places):
        names = " and ".join(f"`{spot.key}`" for spot in spots)
        return f"here that is {names}", own
    here = ("", *HEADER_KEYS, *slots.uses)
    absent = dict.fromkeys(spot.slot for spot in spots if spot.slot not in here)
    replaced = []  # fields that the recipe sets and that cannot be set together with the new ones
    for slot, field in spots:
        values = slots.values.get(slot, {})
        groups = getattr(slots.registry.find(slots.uses.get(slot, "")), "one_of", ())
        others = {name for group in groups if field in group for name in group} - {field}
        given = sorted(name for name in others if values.get(name) is not None)
        replaced += [Spot(slot, name) for name in given if Spot(slot, name) not in spots]
    if unknown.on_command_line and not absent:
        parts = [override(spot.key, new) for spot, new in places]
        return f"write {' '.join([*parts, *(f'{spot.key}=null' for spot in replaced)])}", own
    parts = []
    for spot, new in places:
        *blocks, field = spot.field.split(".")
        text, top = f"{field}: {shortened(new)}", spot.slot in HEADER_KEYS
        for block in [*[spot.slot] * (top and spot.slot != unknown.slot), *blocks][::-1]:
            text = f"{block}: {{{text}}}"
        where = "" if spot.slot == unknown.slot else f" in slot `{spot.slot}`"
        where = " at the top of the recipe" if not spot.slot or (top and where) else where
        parts += [f"`{text}`{where}"] * (spot.slot not in absent)
    for slot in absent:
        beside = [(spot, new) for spot, new in every if _takes(spot, new, slots)]
        fields = {spot.field: new for spot, new in (*beside, *places) if spot.slot == slot}
        parts.append(slots.added(slot, fields))
    verb = "add to the recipe" if unknown.on_command_line else "write"
    instead = " and ".join(f"`{spot.field}`" for spot in replaced)
    of = f" instead of {instead}" if instead else ""
    return f"{verb} {' and '.join(parts)}{of}", own


def _owner(spot: Spot, slots: Slots) -> type | None:
    """Return the dataclass that has the field; None if there is no such field."""
    if not spot.slot or spot.slot in HEADER_KEYS:
        return owner_of(RecipeSettings, tuple(spot.key.split(".")))
    with contextlib.suppress(PluginError):
        stage = slots.registry.find(slots.usual(spot.slot))
        if stage is not None:
            return stage if spot.field == "use" else owner_of(stage, tuple(spot.field.split(".")))
    return None


def _takes(spot: Spot, value: Any, slots: Slots) -> bool:
    if spot.slot and spot.field == "use":
        return value in slots.registry.names()
    owner = _owner(spot, slots)
    return owner is not None and fits(adapter(owner), spot.field.split(".")[-1], value)
