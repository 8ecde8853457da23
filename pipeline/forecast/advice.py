"""Walk through the strategies, the faster first, until one fits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import RecipeError
from pipeline.forecast.options import Order, Saving
from pipeline.forecast.planning import Drawn
from pipeline.forecast.table import gib
from pipeline.presets import Strategy

Draw = Callable[[Sequence[str]], Drawn]
"""Overrides -> the plan of the recipe with them. Raises PipeError."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One way, and what it would need."""

    what: str
    overrides: Sequence[str]
    """What it changes in the recipe."""
    reasons: Sequence[tuple[str, str]]
    """Override -> why, for those that are kept."""
    drawn: Drawn

    @property
    def fits(self) -> bool:
        """Whether nothing is short."""
        return not self.drawn.short

    def told(self) -> str:
        """One line of numbers."""
        drawn = self.drawn
        needed = gib(drawn.margins.of(drawn.forecast.peak))
        there = drawn.hardware.device_memory
        parts = [f"{needed} GiB of {gib(there)} a GPU" if there else f"{needed} GiB a GPU"]
        host = drawn.forecast.host_peak
        known = drawn.hardware.host_memory
        parts.append(
            f"{gib(host)} GiB of {gib(known)} a host" if known else f"{gib(host)} GiB a host"
        )
        if drawn.time is not None and drawn.time.parts:
            parts.append(f"at least {drawn.time.least:.3g} s a step ({drawn.time.bound})")
        return ", ".join(parts)


@dataclass(kw_only=True)
class Walk:
    """Tries one way after another."""

    draw: Draw
    strategies: Sequence[Strategy]
    few_trained: bool
    """Whether only adapters are trained."""
    nodes: int
    tried: list[Tried] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """What cannot be tried here, and why."""

    def run(self) -> Tried | None:
        """The first that fits, or its kind within nodes where that fits too; None if none does."""
        for named in self._suited():
            try:
                found = self._with(named)
            except RecipeError as error:
                self.refused.append(f"{named.name}: {error.problems[0].message}")
                continue
            if found is not None:
                return found
        return None

    def _suited(self) -> Iterator[Strategy]:
        for named in self.strategies:
            order = named.order
            if order == Order.PARTLY_SHARDED and not self.few_trained:
                continue
            if order == Order.SHARDED_WITHIN_NODES:
                continue
            yield named

    def _with(self, named: Strategy) -> Tried | None:
        slot = slot_override("wrap", named.slot)
        first = self._try(named.what, named, [slot], [("wrap", named.what)])
        if first.fits:
            return self._within_nodes(first)
        if named.order < Order.SHARDED:
            return None
        for saved in self._savings(first, named):
            if saved.fits:
                return self._within_nodes(saved)
        return None

    def _savings(self, first: Tried, named: Strategy) -> Iterator[Tried]:
        """One saving after another, each beside those before it."""
        last = first
        while any(short.place == "device" for short in last.drawn.short):
            saving = next(iter(savings(last.drawn)), None)
            if saving is None:
                return
            slot, change = saving
            overrides = [*last.overrides, *field_overrides(slot, change.fields)]
            reasons = [*last.reasons, *((f"{slot}.{key}", change.what) for key in change.fields)]
            last = self._try(f"and {change.what}", named, overrides, reasons)
            yield last

    def _within_nodes(self, found: Tried) -> Tried:
        """The same within nodes, if there are several and it fits: it sends less between them."""
        if self.nodes < 2:
            return found
        for named in self.strategies:
            if named.order == Order.SHARDED_WITHIN_NODES and _sharded(found, self):
                rest = [one for one in found.overrides if not one.startswith("wrap=")]
                why = named.what
                reasons = [("wrap", why), *(one for one in found.reasons if one[0] != "wrap")]
                slot = slot_override("wrap", named.slot)
                other = self._try(why, named, [slot, *rest], reasons)
                if other.fits:
                    return other
        return found

    def _try(
        self,
        what: str,
        named: Strategy,
        overrides: Sequence[str],
        reasons: Sequence[tuple[str, str]],
    ) -> Tried:
        label = f"{named.name}: {what}"
        made = Tried(what=label, overrides=overrides, reasons=reasons, drawn=self.draw(overrides))
        self.tried.append(made)
        return made


def _sharded(found: Tried, walk: Walk) -> bool:
    plain = [n for n in walk.strategies if n.order == Order.SHARDED]
    return any(slot_override("wrap", n.slot) in found.overrides for n in plain)


def savings(drawn: Drawn) -> list[tuple[str, Saving]]:
    """Slot and change, of all stages that can do with less, the cheaper first."""
    found = [
        (step.slot, saving)
        for step in drawn.plan.steps
        if hasattr(step.stage, "savings")
        for saving in step.stage.savings(drawn.site.ranks)
    ]
    return sorted(found, key=lambda one: one[1].order)


def slot_override(slot: str, content: Mapping[str, Any]) -> str:
    """A whole slot as an override."""
    return f"{slot}={json.dumps(content)}"


def field_overrides(slot: str, fields: Mapping[str, Any]) -> list[str]:
    """Fields of a slot as overrides."""
    return [f"{slot}.{key}={json.dumps(value)}" for key, value in fields.items()]
