"""Which stages of a recipe train, told without importing torch."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.artifacts import Data, TrainedRun
from pipeline.errors import UsageError
from pipeline.plan import Plan, Step
from pipeline.signature import needs
from pipeline.tracing.watch import Watch

METHOD = "trace"


def training(plan: Plan) -> Sequence[Step]:
    """The steps that train. Raises UsageError if there are none, or one of them has no trace: what
    that one takes would be left out."""
    traced = [step for step in plan.steps if _takes(step, Watch, METHOD)]
    mute = [
        f"{step.slot}: {step.use}"
        for step in plan.steps
        if issubclass(step.gives or object, TrainedRun)
        and _takes(step, Data, "run")
        and step not in traced
    ]
    if mute or not traced:
        raise UsageError(
            f"this recipe cannot be traced or measured: {', '.join(mute) or 'nothing is trained'}",
            hint="what trains there has no trace" if mute else "give it a train slot",
        )
    return traced


def _takes(step: Step, kind: type, method: str) -> bool:
    stage: type = type(step.stage)
    return hasattr(stage, method) and kind in [need.type for need in needs(stage, method)]
