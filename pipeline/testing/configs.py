"""What a stage makes of a slot's fields, without a recipe around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.errors import Location, Problem
from pipeline.fields import build
from pipeline.marks import Marks
from pipeline.stage import PlanView


def plan_view(
    slots: Mapping[str, Any] | None = None, *, procs: int = 1, device: str = "cpu"
) -> PlanView:
    """What a stage's `check` is given: stages by slot, and how they will be launched."""
    return PlanView(name="test", seed=0, procs=procs, device=device, slots=slots or {})


def problems(
    stage: type, fields: Mapping[str, Any], *, plan: PlanView | None = None
) -> list[Problem]:
    """Everything wrong with a slot of these fields; each problem's `key` starts at a field.

    `fields` are plain values, as in a recipe. What is wrong with single fields comes alone; without
    any, the stage's `check` is asked, with `plan`, or with no other slot. Raises what `check`
    raises, and PluginError when the stage's fields cannot be understood.
    """
    made, found = make(stage, fields)
    if made is None:
        return found
    return checked(made, plan)


def make(stage: type, fields: Mapping[str, Any]) -> tuple[Any, list[Problem]]:
    """The stage that these fields make, or None and what is wrong with them."""
    marks = Marks(keys={}, values={(): Location(file="fields")}, data=fields)
    return build(stage, fields, marks=marks, path=())


def checked(made: Any, plan: PlanView | None = None) -> list[Problem]:
    """What the stage's own `check` finds, if it has one."""
    if not hasattr(made, "check"):
        return []
    return list(made.check(plan or plan_view({"slot": made})))
