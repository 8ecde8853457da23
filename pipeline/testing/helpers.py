"""Make and run a stage from a slot's fields, without a recipe around them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.chain.wiring import SlotType, wired
from pipeline.contracts.metrics import Metrics
from pipeline.contracts.plan_view import PlanView, Wiring
from pipeline.contracts.signature import gives, needs
from pipeline.contracts.stage import Context
from pipeline.distributed.process_group import DistContext
from pipeline.errors import Location, Problem
from pipeline.recipe.fields import build
from pipeline.recipe.nodes import node_of


def plan_view(
    slots: Mapping[str, Any] | None = None, *, procs: int = 1, device: str = "cpu"
) -> PlanView:
    """The argument of a stage's `check`: stages by slot, and how they will be launched."""
    given = slots or {}
    return PlanView(
        name="test", seed=0, procs=procs, device=device, slots=given, wiring=_wiring(given)
    )


def _wiring(slots: Mapping[str, Any]) -> Wiring:
    return wired([SlotType(slot=slot, use="", kind=type(each)) for slot, each in slots.items()])


def problems(
    stage: type, fields: Mapping[str, Any], *, plan: PlanView | None = None
) -> list[Problem]:
    """All problems of a slot with these fields, plain values as in a recipe.

    Each problem's `key` starts at a field. If no field is at fault, the stage's `check` is called
    with `plan`, by default one without other slots, to which the stage is added before the first
    slot that takes its result, or last. Raises whatever `check` raises, and PluginError
    if the stage's fields cannot be understood.
    """
    made, found = make(stage, fields)
    return found if made is None else checked(made, plan)


def make(stage: type, fields: Mapping[str, Any]) -> tuple[Any, list[Problem]]:
    """The stage with these fields, or None and their problems."""
    tree = node_of(fields, Location(file="fields"))
    return build(stage, fields, tree=tree, path=())


def checked(made: Any, plan: PlanView | None = None) -> list[Problem]:
    """The problems that the stage's own `check` yields, if it has one."""
    if not hasattr(made, "check"):
        return []
    view = plan or plan_view()
    if not view.slot(made):
        slots, given = list(view.slots.items()), gives(type(made)) or object
        kinds: list[type] = [type(each) for _, each in slots]
        takes = [any(issubclass(given, need.type) for need in needs(kind)) for kind in kinds]
        at = takes.index(True) if any(takes) else len(slots)
        with_it = dict([*slots[:at], ("slot", made), *slots[at:]])
        view = dataclasses.replace(view, slots=with_it, wiring=_wiring(with_it))
    return list(made.check(view))


def context(run_dir: str | Path, *, seed: int = 0, dist: DistContext | None = None) -> Context:
    """The context of one CPU process without a process group, or of `dist`.

    `run_dir` is created if missing. Rank 0's metrics go to its `metrics.jsonl`, logs to the logger
    `pipe.testing`. Calls registered with `on_exit` are not made.
    """
    import torch

    place, folder = dist or DistContext(device=torch.device("cpu")), Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    metrics = Metrics(folder / "metrics.jsonl" if place.is_main else None)
    log = logging.getLogger("pipe.testing")
    return Context(run_dir=folder, seed=seed, dist=place, log=log, metrics=metrics)
