"""A plan whose names of the hub have the commits that they stand for."""

from __future__ import annotations

from dataclasses import replace

from pipeline.chain.names import field_path, hub_names
from pipeline.chain.plan import Plan
from pipeline.errors import Location, Problem, RecipeError, StageError
from pipeline.recipe import Recipe
from pipeline.recipe.fields import build
from pipeline.recipe.load import with_values
from pipeline.recipe.nodes import KeyPath
from pipeline.utils.hub import HubName, Known, commit_of


def resolved(plan: Plan, known: Known, *, ask: bool = True) -> Plan:
    """The plan with each name's commit in its fields, and in its recipe; without `ask`, only if it
    is `known`. Says each commit. Raises RecipeError where one cannot be found."""
    commits: dict[KeyPath, tuple[HubName, str]] = {}
    problems = []
    for slot, name in hub_names(plan.view.slots):
        if name.pinned or not (ask or name.asked in known):
            continue
        try:
            commits[field_path(slot, name.key)] = name, commit_of(name, known)
        except StageError as error:
            place, key = plan.recipe.places.value(field_path(slot, name.named_by)), name.named_by
            problems.append(Problem(message=str(error), key=f"{slot}.{key}", location=place))
    if problems:
        raise RecipeError(problems)
    if not commits:
        return plan
    values = {path: (commit, _origin(name)) for path, (name, commit) in commits.items()}
    changed = _rebuilt(plan, with_values(plan.recipe, values))
    return replace(changed, hub=tuple(name.record(commit) for name, commit in commits.values()))


def _origin(name: HubName) -> Location:
    return Location(file=f"the hub, {name.asked[2]} at the start")


def _rebuilt(plan: Plan, recipe: Recipe) -> Plan:
    """The plan under a recipe in which values of fields have changed."""
    stages = dict(plan.view.slots)
    for slot, stage in stages.items():
        spec = recipe.stages[slot]
        if spec != plan.recipe.stages[slot]:
            path = ("stages", slot)
            stages[slot], wrong = build(type(stage), spec.fields, places=recipe.places, path=path)
            if wrong:
                raise RecipeError(wrong)
    steps = tuple(replace(planned, stage=stages[planned.slot]) for planned in plan.slots)
    return replace(plan, recipe=recipe, view=replace(plan.view, slots=stages), slots=steps)
