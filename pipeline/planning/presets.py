"""Strategies that installed stages offer by name, for commands that compare them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from pipeline.chain.registry import Registry
from pipeline.contracts.engine import Engine
from pipeline.contracts.signature import gives
from pipeline.errors import PluginError, UsageError
from pipeline.planning.planner import Planner, Planners, Preset
from pipeline.utils.text import did_you_mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy(Preset):
    """A preset under its name, with the stage that offers it."""

    name: str
    use: str

    @property
    def slot(self) -> dict[str, Any]:
        """The slot of a recipe that has it."""
        return {"use": self.use, **self.fields}

    @property
    def generous(self) -> dict[str, Any]:
        """The slot with the fields that spend memory to save time."""
        return {**self.slot, **self.at_first}

    def __str__(self) -> str:
        return f"{self.name} ({self.what})"


def presets(planners: Planners, use: str) -> Mapping[str, Preset]:
    """Presets of a stage's planner by name. Raises PluginError, naming the planner, if it cannot
    give them or one of them is not a Preset."""
    kind = planners.find(use) or Planner
    try:
        found = dict(kind.presets())
        wrong = [name for name, preset in found.items() if not isinstance(preset, Preset)]
        fault = f"`{wrong[0]}` is not a Preset" if wrong else ""
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    if fault:
        raise PluginError(f"{kind.__module__}.{kind.__qualname__}.presets: {fault}")
    return found


def strategies(registry: Registry) -> dict[str, Strategy]:
    """Strategies of all installed stages that give an Engine, by name. Stages that cannot be loaded
    are passed over. Raises PluginError for presets with faults, or for a name offered twice."""
    planners, found = Planners.installed(), dict[str, Strategy]()
    for use in registry.names():
        try:
            entry, kind = registry.entry(use), registry.load(use)
        except PluginError:
            continue
        if not issubclass(gives(kind) or object, Engine):
            continue
        known = {field.name for field in dataclasses.fields(kind)}
        for name, preset in presets(planners, use).items():
            if not {*preset.fields, *preset.at_first} <= known:
                raise PluginError(
                    f"stage `{use}` of {entry}: its preset `{name}` has fields that it has not"
                )
            if name in found:
                other = found[name].use
                raise PluginError(
                    f"strategy `{name}` is offered by {other} and by {use}",
                    hint=f"uninstall one of {registry.entry(other)} and {entry}",
                )
            found[name] = Strategy(name=name, use=use, **vars(preset))
    return found


def chosen(names: list[str], registry: Registry) -> list[Strategy]:
    """The strategies of these names. Raises UsageError for an unknown one."""
    known = strategies(registry)
    for name in names:
        if name not in known:
            raise UsageError(f"there is no strategy `{name}`", hint=did_you_mean(name, known))
    return [known[name] for name in names]


def in_order(registry: Registry) -> list[Strategy]:
    """The strategies that `pipe advise` tries, in its order."""
    found = [strategy for strategy in strategies(registry).values() if strategy.order]
    return sorted(found, key=lambda one: (one.order, math.prod(one.axes.values()), one.name))
