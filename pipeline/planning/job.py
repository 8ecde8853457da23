"""A checked recipe at a place, and what its slots' planners tell of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.plan import Plan
from pipeline.planning.planner import Planners, Results, Topology
from pipeline.planning.shapes import SampleShape

FORECAST = "forecast"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked recipe, where it is to run, and its slots' planners."""

    plan: Plan
    topology: Topology
    planners: Mapping[str, Any]
    """Slot -> the planner of its stage."""
    samples: SampleShape

    @classmethod
    def of(cls, plan: Plan, topology: Topology) -> Job:
        """The job of a recipe. Raises UsageError where no slot tells the length of its samples."""
        planners = Planners.installed().of(plan)
        told = forecasts(plan, topology, planners, Results())[0]
        why = "nothing can be planned: no slot of the recipe tells the length of its samples"
        samples = told.require(SampleShape, why)
        return cls(plan=plan, topology=topology, planners=planners, samples=samples)


def forecasts(
    plan: Plan, topology: Topology, planners: Mapping[str, Any], known: Results
) -> tuple[Results, list[str]]:
    """Ask every slot's planner, and add its answer, by slot, to what is known; and say why the
    other slots tell nothing. Raises what planners raise."""
    told, mute = Results(known), []
    for step in plan.steps:
        planner = planners.get(step.slot)
        if not hasattr(planner, FORECAST):
            mute += [f"slot `{step.slot}` ({step.use}) has no forecast"] if planner is None else []
            continue
        missing = ", ".join(told.missing(planner, FORECAST))
        if missing:
            need = f"slot `{step.slot}` ({step.use}) needs what no slot before it tells: {missing}"
            mute.append(need)
        else:
            told[step.slot] = told.call(planner, FORECAST, topology)
    return told, mute
