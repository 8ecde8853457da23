"""The recipe of a profile: the user's, up to its training, cut to the steps that are recorded."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.bench.trials import shortened_slots
from pipeline.chain.plan import Plan
from pipeline.planning.planner import Trial
from pipeline.recipe.dump import render


def profiled_recipe(plan: Plan, steps: Sequence[int]) -> str:
    """Return the recipe as text; `steps` are numbers from 1. Raises UsageError for one that does
    not train, or whose training cannot be shortened."""
    content = plan.recipe.public()
    shares = next((plan.view.data_ranks(train.stage) for train in plan.trainings), 1)
    trial = Trial(steps=max(steps), profile=tuple(steps), shares=shares)
    recipe = {**content, "stages": shortened_slots(plan, trial)}
    return render({key: value for key, value in recipe.items() if key != "dry_run"})
