"""Names of the hub in a plan: which say no commit, and the plan with the commits in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.contracts.stage import NamesHub
from pipeline.errors import Location, Problem, RecipeError, StageError
from pipeline.recipe.fields import build
from pipeline.recipe.load import with_values
from pipeline.recipe.nodes import KeyPath
from pipeline.utils.hub import HubName, Known, commit_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from pipeline.chain.plan import Plan
    from pipeline.recipe import Recipe

PIN_HINT = "`pipe pin` writes its commit into the recipe"


def hub_names(stages: Mapping[str, Any]) -> Iterator[tuple[str, HubName]]:
    """Yield every slot's names of the hub."""
    for slot, stage in stages.items():
        if isinstance(stage, NamesHub):
            yield from ((slot, name) for name in stage.hub_names())


def unpinned(recipe: Recipe, stages: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield, as a warning, each name that says no commit, at its place."""
    for slot, name in hub_names(stages):
        if name.pinned:
            continue
        key = name.key if name.revision else name.named_by
        branch = f"{name.revision!r} is a branch or tag, not a commit"
        here = Path(name.repo).is_dir()
        local = f"for the folder of this name write ./{name.repo}; {PIN_HINT}"
        yield Problem(
            message=branch if name.revision else f"{name.repo} names no commit",
            key=f"{slot}.{key}", hint=local if here else PIN_HINT,
            location=recipe.places.value(field_path(slot, key)), warning=True,
        )  # fmt: skip


def resolved(plan: Plan, known: Known, *, ask: bool = True) -> Plan:
    """The plan with each name's commit in its fields, and in its recipe; without `ask`, those that
    are `known`. Says each commit. Raises RecipeError where one cannot be found."""
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


def field_path(slot: str, key: str) -> KeyPath:
    """Path of a slot's field in the recipe: of `sources.0.dataset` in the slot `data`,
    `("stages", "data", "sources", 0, "dataset")`."""
    parts = (int(part) if part.isdecimal() else part for part in key.split("."))
    return ("stages", slot, *parts)


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
    steps = tuple(replace(step, stage=stages[step.slot]) for step in plan.steps)
    return replace(plan, recipe=recipe, view=replace(plan.view, slots=stages), steps=steps)
