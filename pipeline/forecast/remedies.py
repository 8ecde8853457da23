"""What would make a recipe fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pipeline.engine import Engine
from pipeline.errors import PipeError
from pipeline.forecast.advice import field_overrides, savings, slot_override
from pipeline.forecast.options import Order
from pipeline.forecast.planning import Drawn
from pipeline.forecast.table import gib
from pipeline.presets import Strategy

MOST_TIMES = 64
"""How many times as many nodes are looked at."""

Draw = Callable[[Sequence[str], int], Drawn]
"""Further overrides, how many times the nodes -> the plan."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Overrides or machines with which it would fit."""

    text: str
    drawn: Drawn

    def line(self) -> str:
        """For people."""
        drawn = self.drawn
        return f"{self.text}  ({gib(drawn.margins.of(drawn.forecast.peak))} GiB a GPU)"


def remedies(drawn: Drawn, draw: Draw, strategies: Sequence[Strategy]) -> Iterator[Remedy]:
    """At most one of each kind: savings of the recipe's own stages, another strategy with them,
    more nodes."""
    overrides, sparing = _spared(drawn, draw, [])
    if not sparing.short:
        yield Remedy(text=" ".join(overrides), drawn=sparing)
    yield from _otherwise(drawn, draw, strategies)
    times = 2
    while times <= MOST_TIMES:
        found = draw(overrides, times)
        if not found.short:
            text = " ".join([f"--nodes {drawn.site.nodes * times}", *overrides])
            yield Remedy(text=text, drawn=found)
            return
        times *= 2


def _otherwise(drawn: Drawn, draw: Draw, strategies: Sequence[Strategy]) -> Iterator[Remedy]:
    """The first other strategy that fits."""
    slot = _wrap_slot(drawn)
    for named in strategies if slot else ():
        within = named.order in (Order.PARTLY_SHARDED, Order.SHARDED_WITHIN_NODES)
        if within or _is_there(drawn, slot, named):
            continue
        start = [slot_override(slot, named.slot)]
        try:
            overrides, found = _spared(draw(start, 1), draw, start)
        except PipeError:  # it does not go with the rest of the recipe
            continue
        if not found.short:
            yield Remedy(text=" ".join(map(_quoted, overrides)), drawn=found)
            return


def _spared(drawn: Drawn, draw: Draw, overrides: list[str]) -> tuple[list[str], Drawn]:
    """The recipe with one saving after another until it fits, or there is none left."""
    while drawn.short:
        found = savings(drawn)
        if not found:
            break
        slot, saving = found[0]
        changed = [*overrides, *field_overrides(slot, saving.fields)]
        overrides = list({one.partition("=")[0]: one for one in changed}.values())
        drawn = draw(overrides, 1)
    return overrides, drawn


def _quoted(override: str) -> str:
    return f"'{override}'" if '"' in override else override


def _wrap_slot(drawn: Drawn) -> str:
    """The first slot that makes an engine."""
    for step in drawn.plan.steps:
        if step.gives is not None and issubclass(step.gives, Engine):
            return step.slot
    return ""


def _is_there(drawn: Drawn, slot: str, named: Strategy) -> bool:
    step = next(step for step in drawn.plan.steps if step.slot == slot)
    fields = named.fields
    return step.use == named.use and all(getattr(step.stage, k) == v for k, v in fields.items())
