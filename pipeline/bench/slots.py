"""The slots of a benchmark's runs: a recipe's own, shortened, with others in their place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from pipeline.artifacts import TrainedRun
from pipeline.engine import Engine
from pipeline.errors import UsageError
from pipeline.field_table import plain_value
from pipeline.fields import adapter
from pipeline.plan import Plan, Step
from pipeline.registry import Registry
from pipeline.stage import Trial

Slot = Mapping[str, Any]
"""`use` and fields, as a recipe has them."""
METHOD = "shortened"


def wrap_of(plan: Plan) -> Step:
    """The slot that wraps. Raises UsageError without one."""
    for step in plan.steps:
        if step.gives is not None and issubclass(step.gives, Engine):
            return step
    raise UsageError(f"recipe `{plan.recipe.name}` has no slot that wraps the model in a strategy")


def as_written(plan: Plan) -> dict[str, Slot]:
    """All of the recipe."""
    slots: dict[str, Slot] = plan.recipe.public()["stages"]
    return slots


def shortened(plan: Plan, trial: Trial) -> dict[str, Slot]:
    """Up to the one that trains, those shortened that can be. Raises UsageError where none trains,
    or the one that does cannot be."""
    found, written = {}, as_written(plan)
    for step in plan.steps:
        trains = step.gives is not None and issubclass(step.gives, TrainedRun)
        if trains and not hasattr(step.stage, METHOD):
            raise UsageError(f"{step.use} cannot be cut to a few steps: it has no `{METHOD}`")
        found[step.slot] = _shortened(written[step.slot], step.stage, trial)
        if trains:
            return found
    raise UsageError(f"recipe `{plan.recipe.name}` has no slot that trains")


def another(slot: Slot, trial: Trial, registry: Registry) -> Slot:
    """One that is to take the place of one of the recipe's, shortened if it can be. What is wrong
    with it is told when the run is planned."""
    kind = registry.load(slot["use"])
    if not hasattr(kind, METHOD):
        return slot
    fields = {name: value for name, value in slot.items() if name != "use"}
    try:
        stage = adapter(kind).validate_json(json.dumps(fields), strict=True)
    except ValidationError:
        return slot
    return _shortened(slot, stage, trial)


def _shortened(slot: Slot, stage: Any, trial: Trial) -> Slot:
    if not hasattr(stage, METHOD):
        return slot
    return {"use": slot["use"], **plain_value(getattr(stage, METHOD)(trial))}
