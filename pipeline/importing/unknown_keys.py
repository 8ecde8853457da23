"""Keys of other tools in a recipe: what they are called there, by the installed translators."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from pipeline.chain.elsewhere import Meant, Slots, Spot, override, shortened
from pipeline.chain.entry_points import kind_of
from pipeline.chain.plan import plan_file
from pipeline.errors import PipeError, PluginError
from pipeline.importing.translator import KeyOutcome, Translators
from pipeline.recipe.field_errors import fits, owner_of
from pipeline.recipe.fields import adapter
from pipeline.recipe.load import HEADER_KEYS, RecipeSettings
from pipeline.recipe.nodes import UnknownKey

Places: TypeAlias = Sequence[tuple[Spot, Any]]
"""Fields, and the value of each."""


def of_other_tools(unknown: Sequence[UnknownKey], slots: Slots) -> list[Meant]:
    """Return what each of a recipe's unknown keys means in other tools, which read all of them as
    one file. No hint for a key that no tool has, or that only a whole file explains."""
    installed, names = Translators.installed(), []
    for each in unknown:  # in the slot of adapter.lora, `r` is `lora_r`
        stage = slots.uses.get(each.slot, "").partition(".")[2]
        own = (each.name, each.name.replace("-", "_"), f"{stage}_{each.name}")
        names.append([*dict.fromkeys(own)])
    pairs = [*zip(unknown, names, strict=True)]
    content = {name: each.value for each, own in pairs for name in own}
    found = []
    for each, own in pairs:
        advice, outcomes = "", []
        for name, entry in itertools.product(own, installed.names()):
            with contextlib.suppress(PipeError):  # it is the recipe that is at fault
                translator = installed.load(entry)()
                advice = advice or translator.advice(name, each.value)
                outcomes.append(translator.meaning(name, {**content, name: each.value}))
        known = sorted(filter(None, outcomes), key=lambda one: not one.to)
        found.append((advice, known, _places(each.value, known[0].to if known else {}, slots)))
    every = [place for _, _, places in found for place in places]
    return [
        _meant(each, advice, outcomes, places, every, slots)
        for each, (advice, outcomes, places) in zip(unknown, found, strict=True)
    ]


def _places(value: Any, to: Mapping[str, Any], slots: Slots) -> list[tuple[Spot, Any]]:
    """Return the places of a translated key, whose slots have the names of their stages' kinds."""
    found = []
    for key, new in to.items():
        same = isinstance(new, bool) == isinstance(value, bool) and new == value  # as 2 and 2.0
        slot, field = key.split(".", 1) if "." in key else ("", key)
        if slot not in ("", *HEADER_KEYS):
            slot = next((one for one, use in slots.uses.items() if kind_of(use) == slot), slot)
        found.append((Spot(slot=slot, field=field), value if same else new))
    return found


def _meant(
    unknown: UnknownKey, advice: str, outcomes: Sequence[KeyOutcome], own: Places, every: Places,
    slots: Slots,
) -> Meant:  # fmt: skip
    if advice:
        return Meant(hint=advice, sure=True)
    for outcome in outcomes:
        if outcome.to:
            return _translated(own, every, unknown, slots)
        if outcome.outcome == "default":
            verb = outcome.why.split(" ")[0] in ("is", "has", "changes", "follows")
            why = f"{'it ' if verb else ''}{outcome.why}"
            if unknown.value is None or unknown.value is False:
                why = f"{shortened(unknown.value)} is the default"
            return Meant(hint=f"leave it out: {why}")
        if outcome.outcome == "not translated":
            return Meant(hint=": ".join(part for part in (outcome.why, outcome.hint) if part))
    # why a value is refused is about a file of the tool; what to do instead is about the recipe
    return Meant(hint=next((one.hint for one in outcomes if one.hint), ""))


plan_recipe = functools.partial(plan_file, foreign=of_other_tools)
"""As `plan_file`, of a recipe that a person wrote: hints know the keys of other tools."""


def _translated(places: Places, every: Places, unknown: UnknownKey, slots: Slots) -> Meant:
    """Return the hint to write values at their places; only the names of fields that cannot have
    them. A slot that the recipe lacks gets its fields of `every` place."""
    spots = [spot for spot, _ in places]
    if lost := [spot for spot in spots if _owner(spot, slots) is None]:
        field, kind = lost[0].field.partition(".")[0], kind_of(lost[0].slot)
        return Meant(hint=slots.stages_with(field, kind))
    own = next((spot for spot in spots if spot.slot == unknown.slot), None)
    if not all(_takes(spot, new, slots) for spot, new in places):
        names = " and ".join(f"`{spot.key}`" for spot in spots)
        return Meant(hint=f"here that is {names}", spot=own, places=places)
    here = ("", *HEADER_KEYS, *slots.uses)
    absent = dict.fromkeys(spot.slot for spot in spots if spot.slot not in here)
    # fields that the recipe sets and that cannot be set together with the new ones
    pairs = [(s, other) for s in spots for other in slots.replaced(s.slot, s.field)]
    replaced = [(s, other) for s, other in pairs if Spot(slot=s.slot, field=other) not in spots]
    if unknown.on_command_line and not absent:
        parts = [override(spot.key, new) for spot, new in places]
        parts += [f"{spot.slot}.{other}=null" for spot, other in replaced]
        return Meant(hint=f"write {' '.join(parts)}", spot=own, places=places)
    parts = [_yaml(spot, new, unknown.slot) for spot, new in places if spot.slot not in absent]
    for slot in absent:
        beside = [(spot, new) for spot, new in every if _takes(spot, new, slots)]
        fields = {spot.field: new for spot, new in (*beside, *places) if spot.slot == slot}
        parts.append(slots.added(slot, fields))
    verb = "add to the recipe" if unknown.on_command_line else "write"
    instead = " and ".join(f"`{other}`" for _, other in replaced)
    of = f" instead of {instead}" if instead else ""
    return Meant(hint=f"{verb} {' and '.join(parts)}{of}", spot=own, places=places)


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


def _yaml(spot: Spot, value: Any, here: str) -> str:
    *blocks, field = spot.field.split(".")
    text = f"{field}: {shortened(value)}"
    for block in reversed(blocks):
        text = f"{block}: {{{text}}}"
    if not spot.slot:
        return f"`{text}` at the top of the recipe"
    if spot.slot in HEADER_KEYS and spot.slot != here:
        return f"`{spot.slot}: {{{text}}}` at the top of the recipe"
    return f"`{text}`" if spot.slot == here else f"`{text}` in slot `{spot.slot}`"
