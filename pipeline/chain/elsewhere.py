"""Keys that are unknown where they stand: the slot or the stage where they belong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.chain.registry import Registry, kind_of
from pipeline.contracts.signature import field_types
from pipeline.errors import PluginError, Problem
from pipeline.recipe import Recipe
from pipeline.recipe.dump import inline
from pipeline.recipe.load import HEADER_KEYS
from pipeline.recipe.shipped import by_use
from pipeline.recipe.unknown import MissingKey, UnknownKey

LONGEST = 90
"""Most characters of a value in a hint."""


@dataclass(frozen=True, kw_only=True)
class Spot:
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
        self.uses = {slot: spec.use for slot, spec in recipe.stages.items()}

    def fields(self, use: str) -> Mapping[str, Any]:
        """The fields of a stage; none for one that cannot be loaded."""
        with contextlib.suppress(PluginError):
            return field_types(self.registry.load(use)) if use in self.registry else {}
        return {}

    def stages_with(self, field: str, kind: str = "") -> str:
        """A hint that names the stages, or those of one kind, that have a field."""
        names = [use for use in self.registry.names(kind) if field in self.fields(use)]
        return f"`{field}` is a field of {' and '.join(names)}" if names else ""


Foreign = Callable[[UnknownKey, Slots], tuple[str, Spot | None]]
"""Knows keys of other programs: returns the hint, empty if there is none, and the field that is
meant if it is one of the same slot."""


def explained(
    problems: Sequence[Problem], recipe: Recipe, registry: Registry, foreign: Foreign | None = None
) -> list[Problem]:
    """Return the problems with better hints for unknown keys. A field that is missing because its
    name is the unknown one is no problem of its own."""
    slots = Slots(recipe, registry)
    found, meant = [], set()
    for problem in problems:
        if isinstance(problem, UnknownKey):
            with contextlib.suppress(PluginError):
                hint, spot = _hint(problem, slots, foreign)
                meant |= {spot.key} if spot else set()
                problem = replace(problem, hint=hint) if hint else problem
        elif isinstance(problem, MissingKey) and problem.key.endswith(".use"):
            slot = problem.key.removesuffix(".use")
            problem = replace(problem, hint=_stages(slot, recipe.stages[slot].fields, registry))
        found.append(problem)
    return [one for one in found if not (isinstance(one, MissingKey) and one.key in meant)]


def _stages(slot: str, fields: Mapping[str, Any], registry: Registry) -> str:
    """The hint for a slot without `use`."""
    for field, value in fields.items():
        if isinstance(value, str) and value in registry:
            return f"write `use: {value}` for `{field}: {value}`"
    recommended = next(iter(by_use(registry.names(slot))), f"{slot}.name")
    return f"add `use: {recommended}`, the stage's name; `pipe stages` lists all"


def _hint(unknown: UnknownKey, slots: Slots, foreign: Foreign | None) -> tuple[str, Spot | None]:
    """The hint, and the field that is meant if it is one of the same slot."""
    path, slot, name = unknown.path, unknown.slot, unknown.name
    if len(path) == 1 and isinstance(unknown.value, dict):
        return "", Spot(slot="", field=unknown.closest)
    if len(path) > 1 and len(path) != (2 if path[0] in HEADER_KEYS else 3):
        return "", None
    here = slots.uses.get(slot, "")
    hint = _other_slot(unknown, slots) or (here and slots.stages_with(name, kind_of(here)))
    if hint:
        return hint, None
    hint, spot = foreign(unknown, slots) if foreign is not None else ("", None)
    hint = hint or slots.stages_with(name)
    if not hint and (unknown.closest in slots.fields(here) or not slot):
        spot = Spot(slot=slot, field=unknown.closest)
    return hint, spot


def _other_slot(unknown: UnknownKey, slots: Slots) -> str:
    name, slot = unknown.name, unknown.slot
    if name in HEADER_KEYS and slot:
        return f"`{name}` stands at the top of a recipe, not in a slot"
    others = [one for one, use in slots.uses.items() if one != slot and name in slots.fields(use)]
    if not others:
        return ""
    if unknown.on_command_line:
        value = shortened(unknown.value)
        return f"write {' or '.join(f'{other}.{name}={value}' for other in others)}"
    return f"`{name}` belongs to slot {' or '.join(f'`{other}`' for other in others)}"


def shortened(value: Any) -> str:
    """A value for a hint, as people write it."""
    here = f"{Path.cwd()}/"
    if isinstance(value, str) and value.startswith(here):
        value = f"./{value.removeprefix(here)}"
    text = inline(value)
    return text if len(text) <= LONGEST else "..."
