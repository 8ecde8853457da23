"""Keys of other tools in a recipe: what they are called there, by the installed translators."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from pipeline.chain.elsewhere import Meant, Slots, Spot, override, shortened
from pipeline.chain.entry_points import kind_of
from pipeline.chain.plan import plan_file
from pipeline.errors import PipeError, PluginError
from pipeline.importing.translator import KeyOutcome, Translator, Translators
from pipeline.recipe.field_example import fits, owner_of
from pipeline.recipe.fields import adapter
from pipeline.recipe.load import HEADER_KEYS, Header
from pipeline.recipe.unknown import UnknownKey

Places: TypeAlias = Sequence[tuple[Spot, Any]]
"""Fields, and the value that each gets."""


def of_other_tools(unknown: Sequence[UnknownKey], slots: Slots) -> list[Meant]:
    """Return what each of a recipe's unknown keys means in other tools, which read all of them as
    one file. No hint for a key that no tool has, or that only a whole file explains."""
    content = {name: each.value for each in unknown for name in _names(each, slots)}

    def read(value: Any) -> Callable[[Translator, str], KeyOutcome | None]:
        return lambda translator, name: translator.meaning(name, {**content, name: value})

    found = [
        sorted(_asked(each, slots, read(each.value)), key=lambda one: not one.to)
        for each in unknown
    ]
    places = [
        [*_places(each.value, one[0].to if one else {}, slots)]
        for each, one in zip(unknown, found, strict=True)
    ]
    return [
        _meant(each, outcomes, own, [*itertools.chain(*places)], slots)
        for each, outcomes, own in zip(unknown, found, places, strict=True)
    ]


def _places(value: Any, to: Mapping[str, Any], slots: Slots) -> Iterator[tuple[Spot, Any]]:
    """The places of a translated key, whose slots have the names of their stages' kinds."""
    for key, new in to.items():
        same = isinstance(new, bool) == isinstance(value, bool) and new == value  # as 2 and 2.0
        slot, field = key.split(".", 1) if "." in key else ("", key)
        if slot not in ("", *HEADER_KEYS):
            slot = next((one for one, use in slots.uses.items() if kind_of(use) == slot), slot)
        yield Spot(slot=slot, field=field), value if same else new


def _names(unknown: UnknownKey, slots: Slots) -> Iterable[str]:
    """Names of a key in other tools: `r` in the slot of adapter.lora is `lora_r`."""
    name, stage = unknown.name, slots.uses.get(unknown.slot, "").partition(".")[2]
    return dict.fromkeys((name, name.replace("-", "_"), f"{stage}_{name}"))


def _meant(
    unknown: UnknownKey, outcomes: Sequence[KeyOutcome], own: Places, every: Places, slots: Slots
) -> Meant:
    for advice in _asked(unknown, slots, lambda one, name: one.advice(name, unknown.value)):
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


def _asked(
    unknown: UnknownKey, slots: Slots, ask: Callable[[Translator, str], Any]
) -> Iterator[Any]:
    """Yield each translator's answer about the key, under each of its names, if it has one."""
    installed = Translators.installed()
    for name, entry in itertools.product(_names(unknown, slots), installed.names()):
        with contextlib.suppress(PipeError):  # it is the recipe that is at fault
            if found := ask(installed.load(entry)(), name):
                yield found


def _translated(places: Places, every: Places, unknown: UnknownKey, slots: Slots) -> Meant:
    """The hint to write values at their places; only the names of fields that cannot have them. A
    slot that the recipe lacks gets its fields of `every` place."""
    owners = [_owner(spot, slots) for spot, _ in places]
    if None in owners:
        spot = places[owners.index(None)][0]
        return Meant(hint=slots.stages_with(spot.field.partition(".")[0], kind_of(spot.slot)))
    own = next((spot for spot, _ in places if spot.slot == unknown.slot), None)
    if not all(_takes(spot, new, slots) for spot, new in places):
        names = " and ".join(f"`{spot.key}`" for spot, _ in places)
        return Meant(hint=f"here that is {names}", spot=own, places=places)
    written = not any(_absent(spot, slots) for spot, _ in places)
    if unknown.on_command_line and written:
        parts = [override(spot.key, new) for spot, new in places]
        parts += [f"{spot.slot}.{other}=null" for spot, other in _replaced(places, slots)]
        return Meant(hint=f"write {' '.join(parts)}", spot=own, places=places)
    parts = [
        _yaml(spot, new, unknown.slot, slots) for spot, new in places if not _absent(spot, slots)
    ]
    for slot in dict.fromkeys(spot.slot for spot, _ in places if _absent(spot, slots)):
        beside = [(spot, new) for spot, new in every if _takes(spot, new, slots)]
        fields = {spot.field: new for spot, new in (*beside, *places) if spot.slot == slot}
        parts.append(slots.added(slot, fields))
    instead = [f"`{other}`" for _, other in _replaced(places, slots)]
    verb = "add to the recipe" if unknown.on_command_line else "write"
    of = f" instead of {' and '.join(instead)}" if instead else ""
    return Meant(hint=f"{verb} {' and '.join(parts)}{of}", spot=own, places=places)


def _absent(spot: Spot, slots: Slots) -> bool:
    return spot.slot not in ("", *HEADER_KEYS, *slots.uses)


def _replaced(places: Sequence[tuple[Spot, Any]], slots: Slots) -> list[tuple[Spot, str]]:
    """The fields that the recipe sets and that cannot be set together with new ones."""
    written = [spot for spot, _ in places]
    pairs = [(spot, other) for spot in written for other in slots.replaced(spot.slot, spot.field)]
    return [(s, other) for s, other in pairs if Spot(slot=s.slot, field=other) not in written]


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
    return f"`{text}` in slot `{spot.slot}`"
