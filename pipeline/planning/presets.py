"""Strategies that installed stages offer by name, for commands that compare them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.contracts.engine import Engine
from pipeline.contracts.signature import gives
from pipeline.errors import PluginError, UsageError
from pipeline.plan.registry import Entry, Registry
from pipeline.planning.planner import Planner, Planners, Preset
from pipeline.utils.text import closest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """A slot that wraps a model, and what to call it."""

    name: str
    use: str
    fields: Mapping[str, Any]
    what: str = ""
    order: int = 0
    at_first: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Extra fields to start from, which spend memory to save time."""

    @property
    def slot(self) -> dict[str, Any]:
        """The slot of a recipe that has it."""
        return {"use": self.use, **self.fields}

    def __str__(self) -> str:
        return f"{self.name} ({self.what})"

    @property
    def generous(self) -> dict[str, Any]:
        """The same, with what takes memory for time."""
        return {**self.slot, **self.at_first}


def presets(planners: Planners, use: str) -> Mapping[str, Preset]:
    """Strategies that a stage's planner offers by name. Raises PluginError, naming the planner, if
    they cannot be had, or one of them is no Preset."""
    kind = planners.find(use) or Planner
    try:
        found = dict(kind.presets())
        wrong = [name for name, preset in found.items() if not isinstance(preset, Preset)]
        fault = f"`{wrong[0]}` is no Preset" if wrong else ""
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    if fault:
        raise PluginError(f"{kind.__module__}.{kind.__qualname__}.presets: {fault}")
    return found


def strategies(registry: Registry) -> dict[str, Strategy]:
    """Strategies of all installed stages that give an Engine, by name. Stages that cannot be loaded
    are passed over. Raises PluginError for one whose presets are not what they should be, or when
    two offer the same name."""
    found: dict[str, Strategy] = {}
    for strategy, entry in _offered(registry):
        other = found.setdefault(strategy.name, strategy)
        if other is not strategy:
            raise PluginError(
                f"strategy `{strategy.name}` is offered by {other.use} and by {strategy.use}",
                hint=f"uninstall one of {registry.entry(other.use)} and {entry}",
            )
    return found


def chosen(names: list[str], registry: Registry) -> list[Strategy]:
    """The strategies of these names. Raises UsageError with the closest name and the list."""
    known = strategies(registry)
    for name in names:
        if name not in known:
            near = closest(name, known)
            meant = f"did you mean `{near}`? " if near else ""
            raise UsageError(
                f"there is no strategy `{name}`",
                hint=f"{meant}installed: {', '.join(known) or 'none'}",
            )
    return [known[name] for name in names]


def _offered(registry: Registry) -> Iterator[tuple[Strategy, Entry]]:
    planners = Planners.installed()
    for name in registry.names():
        try:
            entry, kind = registry.entry(name), registry.load(name)
        except PluginError:
            continue
        given = gives(kind)
        if given is None or not issubclass(given, Engine):
            continue
        known = {field.name for field in dataclasses.fields(kind)}
        for called, preset in presets(planners, name).items():
            if not {*preset.fields, *preset.at_first} <= known:
                raise PluginError(
                    f"stage `{name}` of {entry}: its preset `{called}` has fields that it has not"
                )
            yield Strategy(name=called, use=name, **vars(preset)), entry


def in_order(registry: Registry) -> list[Strategy]:
    """The strategies that `pipe advise` tries, in its order."""
    found = [strategy for strategy in strategies(registry).values() if strategy.order]
    return sorted(found, key=lambda one: (one.order, one.name))
