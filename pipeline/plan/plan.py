"""A recipe's stages loaded, validated and chained: a `Plan`, or every problem at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.contracts.signature import needs
from pipeline.contracts.stage import Checked, PlanView
from pipeline.errors import Location, PluginError, Problem, RecipeError
from pipeline.hardware.gpus import gpu_count
from pipeline.plan.registry import Registry
from pipeline.plan.wiring import SlotType, inputs, missing_inputs
from pipeline.recipe import Recipe, SlotSpec, read_recipe, unless_reported
from pipeline.recipe.fields import build
from pipeline.recipe.nodes import SourceMap
from pipeline.utils.text import plural


@dataclass(frozen=True, kw_only=True)
class PlannedSlot:
    """One stage of the chain, ready to run."""

    slot: str
    use: str
    stage: Any
    inputs: Mapping[str, str | None]
    """Parameter of `run` -> the slot whose artifact it gets; None for an optional one without."""
    gives: type | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole recipe, checked."""

    recipe: Recipe
    view: PlanView
    steps: tuple[PlannedSlot, ...]
    warnings: tuple[Problem, ...] = ()
    """Findings that are probably mistakes, though the recipe can run."""

    def last_reader(self, slot: str) -> str | None:
        """The last slot that reads the result of `slot`, directly or inside of another result; None
        without a reader."""
        order = [step.slot for step in self.steps]
        readers = set()
        for step in self.steps:
            if slot in step.inputs.values():
                later = self.last_reader(step.slot) if _passes_on(step, slot) else None
                readers.add(later or step.slot)
        return max(readers, key=order.index, default=None)


def _passes_on(step: PlannedSlot, slot: str) -> bool:
    """Whether what the step gives is of the kind that it takes from `slot`: it may hold that."""
    stage: type = type(step.stage)
    taken = (need.type for need in needs(stage) if step.inputs.get(need.parameter) == slot)
    return step.gives is not None and any(issubclass(step.gives, kind) for kind in taken)


def make_plan(
    recipe: Recipe,
    *,
    registry: Registry | None = None,
    here: bool = False,
    procs: int | None = None,
) -> Plan:
    """Check everything that can be checked before starting. Raises RecipeError with all problems.

    `here` also asks whether this machine can run it. `procs` is the number of processes when
    another launcher has already decided it.
    """
    plan, problems = _draft(recipe, registry or Registry.installed(), here=here, procs=procs)
    if problems:
        raise RecipeError(in_order(problems))
    return plan


def plan_file(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    registry: Registry | None = None,
    here: bool = False,
    forecast: bool = False,
    procs: int | None = None,
) -> Plan:
    """`load_recipe` and `make_plan` in one, so that the problems of both come together; `forecast`
    leaves out what only a run needs."""
    recipe, problems = read_recipe(path, overrides)
    if recipe is None:
        raise RecipeError(in_order(problems))
    known = registry or Registry.installed()
    plan, more = _draft(recipe, known, here=here, forecast=forecast, procs=procs)
    problems += unless_reported(more, problems)
    if problems:
        raise RecipeError(in_order(problems))
    return plan


def load_slots(
    recipe: Recipe, registry: Registry
) -> tuple[list[SlotType], dict[str, Any], list[Problem]]:
    """Each slot's class, the stages of those without mistakes, and the mistakes."""
    links, stages, problems = [], {}, []
    for slot, spec in recipe.stages.items():
        kind, stage, wrong = _load(slot, spec, registry, recipe.places)
        links.append(SlotType(slot=slot, use=spec.use, kind=kind))
        if stage is not None:
            stages[slot] = stage
        problems.extend(wrong)
    return links, stages, problems


def in_order(problems: Sequence[Problem]) -> list[Problem]:
    """Sort problems by their place in the files; those without a line come first."""
    return sorted(problems, key=lambda problem: problem.location or Location(file=""))


def _draft(
    recipe: Recipe,
    registry: Registry,
    *,
    here: bool,
    forecast: bool = False,
    procs: int | None,
) -> tuple[Plan, list[Problem]]:
    links, stages, problems = load_slots(recipe, registry)
    problems += missing_inputs(links, registry, recipe.places)
    view = _view(recipe, stages, procs, forecast)
    for slot, stage in stages.items():
        problems += _checked(slot, stage, view, recipe.places)
    if not recipe.stages:
        location = recipe.places.value(("stages",))
        problems.append(
            Problem(message="a recipe needs at least one stage", key="stages", location=location)
        )
    if here:
        problems += _impossible_here(recipe, procs)
    steps = tuple(
        PlannedSlot(
            slot=link.slot,
            use=link.use,
            stage=stages[link.slot],
            inputs=inputs(links, index),
            gives=link.gives,
        )
        for index, link in enumerate(links)
        if link.slot in stages
    )
    warnings = tuple(in_order([problem for problem in problems if problem.warning]))
    mistakes = [problem for problem in problems if not problem.warning]
    return Plan(recipe=recipe, view=view, steps=steps, warnings=warnings), mistakes


def _load(
    slot: str, spec: SlotSpec, registry: Registry, places: SourceMap
) -> tuple[type | None, Any, list[Problem]]:
    """The slot's class and stage, as far as there are any, and the mistakes."""
    kind, key, location = None, f"{slot}.use", places.value(("stages", slot, "use"))
    if not spec.use:
        return None, None, []
    if spec.use not in registry:
        message, hint = f"there is no stage `{spec.use}`", registry.hint(spec.use)
        return None, None, [Problem(message=message, key=key, hint=hint, location=location)]
    try:
        kind = registry.load(spec.use)
        return kind, *build(kind, spec.fields, places=places, path=("stages", slot))
    except PluginError as error:
        return kind, None, [Problem(message=str(error), key=key, location=location)]


def _view(recipe: Recipe, stages: Mapping[str, Any], procs: int | None, forecast: bool) -> PlanView:
    launch, gpus = recipe.launch, gpu_count()
    device: str = launch.device
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    return PlanView(
        name=recipe.name,
        seed=recipe.seed,
        procs=procs or launch.procs or (max(gpus, 1) if device == "cuda" else 1),
        device=device,
        slots=stages,
        forecast=forecast,
    )


def _impossible_here(recipe: Recipe, procs: int | None) -> list[Problem]:
    launch, gpus = recipe.launch, gpu_count()
    asked = plural(launch.procs or 1, "process")
    if launch.device == "cuda" and not gpus:
        key, message = "device", "this machine has no CUDA device"
        hint = "use launch.device=cpu or auto"
    elif procs is None and gpus and launch.device != "cpu" and (launch.procs or 1) > gpus:
        key, message = "procs", f"{asked}, but this machine has {plural(gpus, 'GPU')}"
        hint = "start it on every node: torchrun --nnodes NODES --node-rank NUMBER "
        hint += "--nproc-per-node GPUS --master-addr HOST -m pipetrain run RECIPE"
    elif procs is not None and launch.procs not in (None, procs):
        key, message = "procs", f"{asked}, but the launcher started {procs}"
        hint = f"set launch.procs={procs}, or null to take as many as are started"
    else:
        return []
    location = recipe.places.value(("launch", key))
    return [Problem(message=message, key=f"launch.{key}", hint=hint, location=location)]


def _checked(slot: str, stage: Any, view: PlanView, places: SourceMap) -> list[Problem]:
    """Problems that the stage itself finds, with their places filled in."""
    if not isinstance(stage, Checked):
        return []
    try:
        found = list(stage.check(view))
    except Exception as error:
        reason = f"its check failed: {type(error).__name__}: {error}"
        found = [Problem(message=f"`{type(stage).__qualname__}` is at fault, {reason}")]
    return [_placed(problem, slot, places) for problem in found]


def _placed(problem: Problem, slot: str, places: SourceMap) -> Problem:
    parts = [int(part) if part.isdecimal() else part for part in problem.key.split(".") if part]
    location = problem.location or places.value(("stages", slot, *parts))
    if not parts and problem.location is None:
        location = places.key(("stages", slot))
    return replace(problem, key=".".join([slot, *map(str, parts)]), location=location)
