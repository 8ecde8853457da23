"""Keys that are unknown where they stand: the slot or the stage where they belong."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.chain.entry_points import kind_of
from pipeline.chain.registry import Registry
from pipeline.chain.wiring import SlotType, position
from pipeline.errors import PluginError, Problem
from pipeline.recipe import Recipe
from pipeline.recipe.dump import inline
from pipeline.recipe.field_errors import owner_of
from pipeline.recipe.fields import build
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

    def replaced(self, slot: str, field: str) -> list[str]:
        """The fields of a slot that the recipe sets, and that cannot be set together with one."""
        set_here = {name for name, value in self.values.get(slot, {}).items() if value is not None}
        groups = getattr(self.registry.find(self.uses.get(slot, "")), "one_of", ())
        alternatives = {name for group in groups if field in group for name in group}
        return sorted(alternatives & set_here - {field})


class Meant(NamedTuple):
    """The meaning of an unknown key in another program."""

    hint: str = ""
    """Empty if there is none."""
    spot: Spot | None = None
    """The field that is meant if it is one of the same slot."""
    places: Sequence[tuple[Spot, Any]] = ()
    """All fields that are meant, and their values."""
    sure: bool = False
    """Whether the hint holds also where another slot has a field of the key's name."""


Foreign = Callable[[Sequence[UnknownKey], Slots], Sequence[Meant]]
"""Knows keys of other programs: returns what each of a recipe's unknown keys means there."""


def explained(
    problems: Sequence[Problem], recipe: Recipe, registry: Registry, foreign: Foreign | None = None
) -> list[Problem]:
    """Return the problems with better hints for unknown keys. A field that is missing because its
    name is the unknown one is not reported separately."""
    slots = Slots(recipe, registry)
    every = [one for problem in problems for one in _about_slots(problem, slots, recipe, foreign)]
    unknown = [one for one in every if isinstance(one, UnknownKey)]
    elsewhere = iter(foreign(unknown, slots) if foreign is not None and unknown else ())
    found, meant = [], set()
    for problem in every:
        if isinstance(problem, UnknownKey):
            there = next(elsewhere, Meant())
            with contextlib.suppress(PluginError):
                hint, spot = _hint(problem, slots, there)
                meant |= {spot.key} if spot else set()
                problem = replace(problem, hint=hint) if hint else problem
        found.append(problem)
    return [one for one in found if not (isinstance(one, MissingKey) and one.key in meant)]


def _about_slots(
    problem: Problem, slots: Slots, recipe: Recipe, foreign: Foreign | None
) -> Iterator[Problem]:
    """The problem, with a better hint if it is of a slot as a whole. A slot without `use` has the
    fields of the stage that it seems to name."""
    known = slots.registry
    if isinstance(problem, MissingKey) and problem.key.endswith(".use"):
        slot = problem.key.removesuffix(".use")
        hint, use = _stage_meant(slot, slots, foreign)
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


def _stage_meant(slot: str, slots: Slots, foreign: Foreign | None) -> tuple[str, str]:
    """The hint for a slot without `use`, and the stage that is meant; empty if nothing says it."""
    for field, value in slots.values[slot].items():
        if isinstance(value, str) and value in slots.registry:
            return f"write `use: {value}` for `{field}: {value}`", value
    use = slots.usual(slot)
    if not use and foreign is not None:  # `lora:` and `peft:`
        named = UnknownKey(message="", path=(slot,), value=True)
        places = foreign([named], slots)[0].places
        use = next((value for spot, value in places if spot.field == "use"), "")
    return f"add `use: {use or f'{slot}.name'}`, the stage's name; `pipe stages` lists all", use


def _hint(unknown: UnknownKey, slots: Slots, there: Meant) -> tuple[str, Spot | None]:
    """The hint, and the field that is meant if it is one of the same slot."""
    path, slot, name = unknown.path, unknown.slot, unknown.name
    if there.sure:
        return there.hint, there.spot
    if unknown.on_command_line and path[0] not in (*HEADER_KEYS, "stages", *slots.uses):
        added = _missing_slot(unknown, slots)
        if added or len(path) > 1:
            return added, None
    if len(path) == 1 and isinstance(unknown.value, dict):
        return "", Spot("", unknown.closest)
    if len(path) > 1 and len(path) != (2 if path[0] in HEADER_KEYS else 3):
        return "", None
    here = slots.uses.get(slot, "")
    hint = _other_slot(unknown, slots) or (here and slots.stages_with(name, kind_of(here)))
    if hint:
        return hint, None
    hint, spot = there.hint or slots.stages_with(name), there.spot
    if not hint and (unknown.closest in slots.registry.fields(here) or not slot):
        spot = Spot(slot, unknown.closest)
    return hint, spot


def _missing_slot(unknown: UnknownKey, slots: Slots) -> str:
    """The hint for an override of a slot that the recipe lacks, and that is known."""
    slot, *rest = map(str, unknown.path)
    fields: Any = {".".join(rest): unknown.value} if rest else unknown.value
    if isinstance(fields, str) and fields in slots.registry:
        fields = {"use": fields}
    if not isinstance(fields, dict) or not slots.registry.names(slot):
        return ""
    return f"an override cannot add a slot: add to the recipe {slots.added(slot, fields)}"


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
