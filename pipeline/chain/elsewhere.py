"""Keys that are unknown where they stand: what they are called here, or where they belong.

Knows the fields of the recipe's other slots, those of other stages of the same kind, and, by the
installed translators of `pipe import`, the names that other tools use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pipeline.chain.registry import Plugins, Registry, installed_entries, kind_of
from pipeline.contracts.signature import field_types
from pipeline.errors import PluginError, Problem
from pipeline.recipe import Recipe
from pipeline.recipe.dump import inline
from pipeline.recipe.load import HEADER_KEYS
from pipeline.recipe.shipped import by_use
from pipeline.recipe.unknown import UnknownKey

TRANSLATORS = "pipe.imports"
"""The entry-point group of translators, which `pipeline.importing` describes."""
LACKING = ("is required", "a recipe needs at least one stage")
"""Messages about keys that are not there."""
LONGEST = 90
"""Most characters of a value in a hint."""


class Meaning(Protocol):
    """What a recipe makes of a key of another tool: `pipeline.importing.KeyOutcome`."""

    @property
    def to(self) -> Mapping[str, Any]:
        """Dotted key of a recipe -> value."""

    @property
    def outcome(self) -> str:
        """`default` for a key that needs no place in a recipe."""

    @property
    def why(self) -> str:
        """Why there is none."""

    @property
    def hint(self) -> str:
        """What to do then."""


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A slot and a field of it; `slot` is empty for a key at the top of a recipe."""

    slot: str
    field: str

    @property
    def key(self) -> str:
        return f"{self.slot}.{self.field}" if self.slot else self.field


def explained(problems: Sequence[Problem], recipe: Recipe, registry: Registry) -> list[Problem]:
    """Return the problems with better hints for unknown keys. A field that is missing because its
    name is the unknown one is no problem of its own."""
    finder = _Finder(recipe, registry)
    found, meant = [], set()
    for problem in problems:
        if isinstance(problem, UnknownKey):
            with contextlib.suppress(PluginError):
                hint, spot = finder.hint(problem)
                meant |= {spot.key} if spot else set()
                problem = replace(problem, hint=hint) if hint else problem
        elif problem.message == "is missing" and problem.key.endswith(".use"):
            slot = problem.key.removesuffix(".use")
            problem = replace(problem, hint=finder.stages(slot, recipe.stages[slot].fields))
        found.append(problem)
    return [one for one in found if not (one.message in LACKING and one.key in meant)]


class _Finder:
    def __init__(self, recipe: Recipe, registry: Registry) -> None:
        self._registry = registry
        self._uses = {slot: spec.use for slot, spec in recipe.stages.items()}

    def stages(self, slot: str, fields: Mapping[str, Any]) -> str:
        """The hint for a slot without `use`."""
        for field, value in fields.items():
            if isinstance(value, str) and value in self._registry:
                return f"write `use: {value}` for `{field}: {value}`"
        names = self._registry.names(slot)
        recommended = next(iter(by_use(names)), f"{slot}.name")
        return f"add `use: {recommended}`, the stage's name; `pipe stages` lists all"

    def hint(self, unknown: UnknownKey) -> tuple[str, Spot | None]:
        """The hint, and the field that is meant if it is one of the same slot."""
        path = unknown.path
        if len(path) == 1 and isinstance(unknown.value, dict):
            return "", Spot(slot="", field=_suggested(unknown))
        if len(path) > 1 and len(path) != (2 if path[0] in HEADER_KEYS else 3):
            return "", None
        slot = str(path[-2]) if len(path) > 1 else ""
        name, here = str(path[-1]), self._uses.get(slot, "")
        command_line = unknown.location is not None and unknown.location.on_command_line
        hint = self._other_slot(name, slot, unknown.value, command_line=command_line)
        hint = hint or self._other_stage(name, here)
        if hint:
            return hint, None
        of_stage = f"{here.partition('.')[2]}_{name}"  # peft's `r` is elsewhere `lora_r`
        for written in dict.fromkeys((name, name.replace("-", "_"), of_stage)):
            meaning = _meaning(written, unknown.value)
            if meaning is not None:
                return self._translated(meaning, slot, unknown.value, command_line=command_line)
        known = field_types(self._registry.load(here)) if here in self._registry else {}
        meant = _suggested(unknown)
        return "", Spot(slot=slot, field=meant) if meant in known or not slot else None

    def _other_slot(self, name: str, slot: str, value: Any, *, command_line: bool) -> str:
        if name in HEADER_KEYS and slot:
            return f"`{name}` stands at the top of a recipe, not in a slot"
        others = [
            other
            for other, use in self._uses.items()
            if other != slot and name in self._fields(use)
        ]
        if not others:
            return ""
        if command_line:
            return f"write {' or '.join(f'{other}.{name}={_short(value)}' for other in others)}"
        return f"`{name}` belongs to slot {' or '.join(f'`{other}`' for other in others)}"

    def _other_stage(self, name: str, here: str) -> str:
        if not here:
            return ""
        names = [use for use in self._registry.names(kind_of(here)) if name in self._fields(use)]
        return f"`{name}` is a field of {' and '.join(names)}" if names else ""

    def _fields(self, use: str) -> Mapping[str, Any]:
        with contextlib.suppress(PluginError):
            return field_types(self._registry.load(use)) if use in self._registry else {}
        return {}

    def _translated(
        self, meaning: Meaning, slot: str, value: Any, *, command_line: bool
    ) -> tuple[str, Spot | None]:
        if not meaning.to and meaning.outcome == "default":
            return f"leave it out: it {meaning.why}", None
        if not meaning.to:
            return ": ".join(part for part in (meaning.why, meaning.hint) if part), None
        spots = {self._spot(key): value if new == value else new for key, new in meaning.to.items()}
        if command_line:
            return f"write {' '.join(f'{s.key}={_short(new)}' for s, new in spots.items())}", None
        parts = [self._yaml(spot, new, slot) for spot, new in spots.items()]
        own = next((spot for spot in spots if spot.slot == slot), None)
        return f"write {' and '.join(parts)}", own

    def _spot(self, key: str) -> Spot:
        """The place of a translated key, whose slot has the name of its stage's kind."""
        kind, dot, field = key.partition(".")
        if not dot:
            return Spot(slot="", field=key)
        if kind in HEADER_KEYS:
            return Spot(slot=kind, field=field)
        slot = next((slot for slot, use in self._uses.items() if kind_of(use) == kind), kind)
        return Spot(slot=slot, field=field)

    def _yaml(self, spot: Spot, value: Any, here: str) -> str:
        *blocks, field = spot.field.split(".")
        text = f"{field}: {_short(value)}"
        for block in reversed(blocks):
            text = f"{block}: {{{text}}}"
        if not spot.slot:
            return f"`{text}` at the top of the recipe"
        if spot.slot == here:
            return f"`{text}`"
        if spot.slot in HEADER_KEYS:
            return f"`{spot.slot}: {{{text}}}` at the top of the recipe"
        if spot.slot in self._uses:
            return f"`{text}` in slot `{spot.slot}`"
        use = by_use(self._registry.names(spot.slot))
        own = f"use: {use[0]}, " if use and field != "use" else ""
        return f"a slot `{spot.slot}: {{{own}{text}}}`"


def _suggested(unknown: UnknownKey) -> str:
    """The name that the key's own hint suggests, if it suggests one."""
    return unknown.hint.removeprefix("did you mean `").removesuffix("`?")


def _meaning(name: str, value: Any) -> Meaning | None:
    """What the installed translators make of a key: a place in the recipe, if one has it."""
    found: list[Meaning] = []
    translators = Translators(installed_entries(TRANSLATORS))
    for entry in translators.names():
        with contextlib.suppress(Exception):  # a plugin that fails has nothing to say
            meaning = translators.load(entry)().meaning(name, value)
            found += [] if meaning is None else [meaning]
    return next((one for one in found if one.to), found[0] if found else None)


class Translators(Plugins[Any]):
    """Translator classes by name."""

    group = TRANSLATORS
    noun = "translator"


def _near(text: str) -> str:
    """A path below the current folder as people write it."""
    here = f"{Path.cwd()}/"
    return f"./{text.removeprefix(here)}" if text.startswith(here) else text


def _short(value: Any) -> str:
    text = inline(_near(value) if isinstance(value, str) else value)
    return text if len(text) <= LONGEST else "..."
