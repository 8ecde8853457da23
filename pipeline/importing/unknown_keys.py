"""Keys of other tools in a recipe: what they are called there, by the installed translators."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.chain.elsewhere import Slots, Spot, override, shortened
from pipeline.chain.plan import plan_file
from pipeline.chain.registry import kind_of
from pipeline.errors import PipeError, PluginError
from pipeline.importing.translator import KeyOutcome, Translators
from pipeline.recipe.field_example import fits, owner_of
from pipeline.recipe.fields import adapter
from pipeline.recipe.load import HEADER_KEYS, Header
from pipeline.recipe.unknown import UnknownKey


def of_other_tools(unknown: UnknownKey, slots: Slots) -> tuple[str, Spot | None]:
    """Return the hint for a key of another tool, and the field that it means if that is one of the
    same slot; an empty hint for a key that no tool has, or that only a whole file explains."""
    name = unknown.name
    stage = slots.uses.get(unknown.slot, "").partition(".")[2]
    names = dict.fromkeys((name, name.replace("-", "_"), f"{stage}_{name}"))  # `r` is `lora_r`
    outcomes = [one for each in names for one in _outcomes(each, unknown.value)]
    for outcome in sorted(outcomes, key=lambda one: not one.to):
        if outcome.to:
            return _translated(outcome.to, unknown, slots)
        if outcome.outcome == "default":
            return f"leave it out: it {outcome.why}", None
        if outcome.outcome == "not translated":
            return ": ".join(part for part in (outcome.why, outcome.hint) if part), None
    # why a value is refused is about a file of the tool; what to do instead is about the recipe
    return next((one.hint for one in outcomes if one.hint), ""), None


plan_recipe = functools.partial(plan_file, foreign=of_other_tools)
"""As `plan_file`, of a recipe that a person wrote: hints know the keys of other tools."""


def _outcomes(name: str, value: Any) -> Iterator[KeyOutcome]:
    translators = Translators.installed()
    for entry in translators.names():
        with contextlib.suppress(PipeError):  # it is the recipe that is at fault
            outcome = translators.load(entry)().meaning(name, value)
            if outcome is not None:
                yield outcome


def _translated(
    to: Mapping[str, Any], unknown: UnknownKey, slots: Slots
) -> tuple[str, Spot | None]:
    """The hint to write values at their places; only the names of fields that cannot have them."""
    value = unknown.value
    places = [(_spot(key, slots), value if new == value else new) for key, new in to.items()]
    owners = [_owner(spot, slots) for spot, _ in places]
    if None in owners:
        spot = places[owners.index(None)][0]
        return slots.stages_with(spot.field.partition(".")[0], kind_of(spot.slot)), None
    own = next((spot for spot, _ in places if spot.slot == unknown.slot), None)
    if not all(_takes(spot, new, slots) for spot, new in places):
        names = " and ".join(f"`{spot.key}`" for spot, _ in places)
        return f"here that is {names}", own
    written = all(spot.slot in ("", *HEADER_KEYS, *slots.uses) for spot, _ in places)
    if unknown.on_command_line and written:
        parts = [override(spot.key, new) for spot, new in places]
        parts += [f"{spot.slot}.{other}=null" for spot, other in _replaced(places, slots)]
        return f"write {' '.join(parts)}", own
    parts = [_yaml(spot, new, unknown.slot, slots) for spot, new in places]
    instead = [f"`{other}`" for _, other in _replaced(places, slots)]
    verb = "add to the recipe" if unknown.on_command_line else "write"
    of = f" instead of {' and '.join(instead)}" if instead else ""
    return f"{verb} {' and '.join(parts)}{of}", own


def _replaced(places: Sequence[tuple[Spot, Any]], slots: Slots) -> list[tuple[Spot, str]]:
    """The fields that the recipe sets and that cannot be set together with new ones."""
    written = [spot for spot, _ in places]
    pairs = [(spot, other) for spot in written for other in slots.replaced(spot.slot, spot.field)]
    return [(s, other) for s, other in pairs if Spot(slot=s.slot, field=other) not in written]


def _spot(key: str, slots: Slots) -> Spot:
    """The place of a translated key, whose slot has the name of its stage's kind."""
    kind, dot, field = key.partition(".")
    if not dot:
        return Spot(slot="", field=key)
    if kind in HEADER_KEYS:
        return Spot(slot=kind, field=field)
    slot = next((slot for slot, use in slots.uses.items() if kind_of(use) == kind), kind)
    return Spot(slot=slot, field=field)


def _owner(spot: Spot, slots: Slots) -> type | None:
    """The dataclass that has the field; None if there is no such field."""
    if not spot.slot or spot.slot in HEADER_KEYS:
        return owner_of(Header, tuple(spot.key.split(".")))
    use = slots.usual(spot.slot)
    with contextlib.suppress(PluginError):
        stage = slots.registry.load(use) if use in slots.registry else None
        if stage is not None:
            return stage if spot.field == "use" else owner_of(stage, tuple(spot.field.split(".")))
    return None


def _takes(spot: Spot, value: Any, slots: Slots) -> bool:
    if spot.slot and spot.field == "use":
        return value in slots.registry.names()
    owner = _owner(spot, slots)
    return owner is not None and fits(adapter(owner), spot.field.split(".")[-1], value)


def _yaml(spot: Spot, value: Any, here: str, slots: Slots) -> str:
    *blocks, field = spot.field.split(".")
    text = f"{field}: {shortened(value)}"
    for block in reversed(blocks):
        text = f"{block}: {{{text}}}"
    if not spot.slot:
        return f"`{text}` at the top of the recipe"
    if spot.slot == here:
        return f"`{text}`"
    if spot.slot in HEADER_KEYS:
        return f"`{spot.slot}: {{{text}}}` at the top of the recipe"
    if spot.slot in slots.uses:
        return f"`{text}` in slot `{spot.slot}`"
    content: Any = value
    for part in reversed(spot.field.split(".")):
        content = {part: content}
    return slots.added(spot.slot, content)
