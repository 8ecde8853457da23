"""A recipe's stages loaded, validated and chained: a `Plan`, or every problem at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.chain.artifacts import training_of, training_slots, wrong_artifact
from pipeline.chain.elsewhere import Foreign, explained
from pipeline.chain.entry_points import line_in
from pipeline.chain.names import unpinned
from pipeline.chain.registry import Registry
from pipeline.chain.wiring import SlotType, missing_inputs, unread_results, wired, wrong_takes
from pipeline.contracts.engine import Engine
from pipeline.contracts.plan_view import Checked, PlanView, Wiring
from pipeline.contracts.training import TrainedRun
from pipeline.distributed.launch import Launch, LaunchInfo
from pipeline.errors import Location, PluginError, Problem, RecipeError, UsageError
from pipeline.hardware.gpus import gpu_count
from pipeline.recipe import Recipe, SlotSpec, read_recipe, unless_reported
from pipeline.recipe.fields import build
from pipeline.recipe.nodes import MissingKey, SourceMap, UnknownKey
from pipeline.utils.hub import pins_asked
from pipeline.utils.text import did_you_mean, plural


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
    slots: tuple[PlannedSlot, ...]
    per_node: int
    """Processes on each node."""
    warnings: tuple[Problem, ...] = ()
    """Findings that are probably mistakes, though the recipe can run."""
    hub: tuple[Mapping[str, str], ...] = ()
    """Names of the hub that a start has replaced by commits, as `HubName.record` writes them."""

    @property
    def trainings(self) -> list[PlannedSlot]:
        """The slots that train, in order."""
        return [
            planned for planned in self.slots if issubclass(planned.gives or object, TrainedRun)
        ]

    def wrap_of(self, train: PlannedSlot) -> PlannedSlot | None:
        """The slot that wraps the model for a slot that trains; None without one."""
        *_, first = None, *self.view.wiring.producers(train.slot, Engine)
        return next((planned for planned in self.slots if planned.slot == first), None)

    def of_training(self, training: str) -> Plan:
        """The part of the plan that is of one slot that trains: what it takes, however indirectly,
        and what follows from it and is of no other training."""
        wiring = self.view.wiring
        taken = {slot: self._taken(slot) for slot in training_slots(wiring)}
        first = next(iter(taken))
        for_any = set[str]().union(*taken.values())
        kept = [
            planned
            for planned in self.slots
            if planned.slot in taken[training]
            or (
                planned.slot not in for_any
                and (training_of(wiring, planned.slot) or first) == training
            )
        ]
        slots = {planned.slot: planned.stage for planned in kept}
        return replace(self, slots=tuple(kept), view=replace(self.view, slots=slots))

    def _taken(self, slot: str) -> set[str]:
        """The slot and those whose results reach it, other trainings left out."""
        trainings = training_slots(self.view.wiring)
        inputs = {one for one in self.view.wiring.inputs[slot].values() if one is not None}
        return {slot}.union(*(self._taken(one) for one in inputs if one not in trainings))

    def until(self, last: str | None) -> Plan:
        """The plan without the slots after `last`. Raises UsageError for a slot that it lacks."""
        if not last:
            return self
        order = [planned.slot for planned in self.slots]
        if last not in order:
            raise UsageError(f"the recipe has no slot `{last}`", hint=did_you_mean(last, order))
        return replace(self, slots=self.slots[: order.index(last) + 1])

    def last_reader(self, slot: str) -> str | None:
        """The last slot that reads the result of `slot`, directly or inside of another result; None
        without a reader."""
        return next(reversed([*self.view.wiring.readers(slot)]), None)


def make_plan(
    recipe: Recipe,
    *,
    registry: Registry | None = None,
    for_this_machine: bool = False,
    skip_checks: bool = False,
    started: LaunchInfo | None = None,
) -> Plan:
    """Check everything that can be checked before starting. Raises RecipeError with all problems.

    `for_this_machine` also asks whether this machine can run it. `skip_checks` leaves out the
    stages' own checks, for a run that has passed them: they depend on how it was started. `started`
    is what another launcher has already decided.
    """
    known = registry or Registry.installed()
    plan, problems = _draft(
        recipe,
        known,
        for_this_machine=for_this_machine,
        skip_checks=skip_checks,
        started=started or LaunchInfo(),
    )
    if problems:
        raise RecipeError(in_order(explained(problems, recipe, known)))
    return plan


def plan_file(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    registry: Registry | None = None,
    for_this_machine: bool = False,
    forecast: bool = False,
    skip_checks: bool = False,
    started: LaunchInfo | None = None,
    foreign: Foreign | None = None,
) -> Plan:
    """`load_recipe` and `make_plan` in one, so that the problems of both come together; `forecast`
    leaves out what only a run needs. `foreign` knows keys of other programs."""
    known = registry or Registry.installed()
    recipe, problems = read_recipe(path, overrides, known.common_fields)
    if recipe is None:
        raise RecipeError(in_order(problems))
    given = started or LaunchInfo()
    astray = any(
        one.key == "stages" or (isinstance(one, UnknownKey) and one.misplaced_slot)
        for one in problems
    )
    plan, more = _draft(
        recipe,
        known,
        for_this_machine=for_this_machine,
        forecast=forecast,
        skip_checks=skip_checks,
        started=given,
        incomplete=astray,
    )
    problems += unless_reported(more, problems)
    if problems:
        raise RecipeError(in_order(explained(problems, recipe, known, foreign)))
    return plan


def load_slots(
    recipe: Recipe, registry: Registry
) -> tuple[list[SlotType], dict[str, Any], list[Problem]]:
    """Each slot's class, the stages of those without mistakes, and the mistakes."""
    links, stages, problems = [], {}, []
    for slot, spec in recipe.stages.items():
        kind, stage, wrong = _load(slot, spec, registry, recipe.places)
        links.append(SlotType(slot=slot, use=spec.use, kind=kind, takes=spec.takes))
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
    for_this_machine: bool,
    forecast: bool = False,
    skip_checks: bool = False,
    started: LaunchInfo,
    incomplete: bool = False,
) -> tuple[Plan, list[Problem]]:
    """The plan as far as there is one, and the mistakes. Needs are not looked at in an `incomplete`
    recipe, some of whose slots stand elsewhere."""
    links, stages, problems = load_slots(recipe, registry)
    wiring = wired(links)
    problems += wrong_takes(links, recipe.places)
    if not incomplete:
        problems += missing_inputs(links, registry, recipe.places)
    if not problems:
        problems += unread_results(links, wiring, recipe.places)
    problems += recipe.replaced
    view = _view(recipe, stages, wiring, started, forecast)
    for slot, stage in stages.items() if not skip_checks else ():
        problems += _checked(slot, recipe.stages[slot].use, stage, view, recipe.places)
    if pins_asked() and not skip_checks:
        problems += [replace(one, warning=False) for one in unpinned(recipe, stages)]
    if not recipe.stages and not incomplete:
        location = recipe.places.value(("stages",))
        problems.append(
            MissingKey(message="a recipe needs at least one stage", key="stages", location=location)
        )
    if for_this_machine:
        problems += _impossible_here(recipe, started)
    slots = tuple(
        PlannedSlot(
            slot=link.slot,
            use=link.use,
            stage=stages[link.slot],
            inputs=wiring.inputs[link.slot],
            gives=link.gives,
        )
        for link in links
        if link.slot in stages
    )
    warnings = tuple(in_order([problem for problem in problems if problem.warning]))
    mistakes = [problem for problem in problems if not problem.warning]
    nodes = started.nodes or recipe.launch.most_nodes or 1
    per_node = recipe.launch.procs or started.per_node or view.procs // nodes
    plan = Plan(recipe=recipe, view=view, slots=slots, per_node=per_node, warnings=warnings)
    return plan, mistakes


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
        wrong = wrong_artifact(kind, spec.use)
        if wrong:  # of other slots nothing can be said
            return None, None, [Problem(message=wrong, key=key, location=location)]
        return kind, *build(kind, spec.fields, places=places, path=("stages", slot))
    except PluginError as error:
        return kind, None, [Problem(message=str(error), key=key, location=location)]


def _view(
    recipe: Recipe, stages: Mapping[str, Any], wiring: Wiring, started: LaunchInfo, forecast: bool
) -> PlanView:
    launch, gpus = recipe.launch, gpu_count()
    device: str = launch.device
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    per_node = launch.procs or started.per_node or (max(gpus, 1) if device == "cuda" else 1)
    return PlanView(
        name=recipe.name,
        seed=recipe.seed,
        procs=started.procs or per_node * (started.nodes or launch.most_nodes or 1),
        device=device,
        slots=stages,
        wiring=wiring,
        forecast=forecast,
    )


def _impossible_here(recipe: Recipe, started: LaunchInfo) -> list[Problem]:
    """Why the recipe cannot run on this machine, or with what was started; at most one problem."""
    launch, gpus = recipe.launch, gpu_count()
    if launch.device == "cuda" and not gpus:
        key, message = "device", "this machine has no CUDA device"
        hint = "use launch.device=cpu or auto"
    elif launch.device != "cpu" and gpus and started.procs is None and (launch.procs or 1) > gpus:
        key = "procs"
        asked = plural(launch.procs or 1, "process")
        message = f"{asked} on each node, but this machine has {plural(gpus, 'GPU')}"
        hint = f"set launch.procs={gpus} and launch.nodes, or null to take as many as there are"
    elif wrong := _not_as_started(launch, started):
        key, message, hint = wrong
    else:
        return []
    location = recipe.places.value(("launch", key))
    return [Problem(message=message, key=f"launch.{key}", hint=hint, location=location)]


def _not_as_started(launch: Launch, started: LaunchInfo) -> tuple[str, str, str] | None:
    """Key, message and hint where what was started contradicts the recipe."""
    here = started.per_node or (started.procs if launch.most_nodes in (None, 1) else None)
    if launch.procs is not None and here not in (None, launch.procs):
        asked = plural(launch.procs, "process")
        on = "" if launch.most_nodes in (None, 1) else " on each node"
        message = f"{asked}{on}, but the launcher started {here}"
        return "procs", message, f"set launch.procs={here}, or null to take as many as are started"
    nodes = started.nodes
    if nodes is None and started.procs is not None and (launch.procs or started.per_node):
        nodes = started.procs // (launch.procs or started.per_node or 1)
    least, most = launch.fewest_nodes or 1, launch.most_nodes
    if nodes is None and started.procs is None and least > 1:
        hint = "on every node: pipe run RECIPE --nodes NODES --node-rank NUMBER --rdzv HOST:PORT, "
        hint += "or have `pipe launch` write a script; or set launch.nodes=1"
        return "nodes", f"{least} nodes, but this is one", hint
    if nodes is not None and most is not None and not least <= nodes <= most:
        asked = str(most) if least == most else f"{least} to {most}"
        hint = f"set launch.nodes={nodes}, or null to take as many as there are"
        return "nodes", f"{asked} nodes, but {plural(nodes, 'node')} were started", hint
    return None


def require_sound(plan: Plan, kind: type) -> None:
    """Make the own checks of a plan's stages of a kind, which `skip_checks` has left out. Raises
    RecipeError."""
    problems = [
        problem
        for planned in plan.slots
        if isinstance(planned.stage, kind)
        for problem in _checked(
            planned.slot, planned.use, planned.stage, plan.view, plan.recipe.places
        )
        if not problem.warning
    ]
    if problems:
        raise RecipeError(in_order(problems))


def _checked(slot: str, use: str, stage: Any, view: PlanView, places: SourceMap) -> list[Problem]:
    """Problems that the stage itself finds, with their places filled in."""
    if not isinstance(stage, Checked):
        return []
    try:
        found: list[Any] = list(stage.check(view))
    except Exception as error:
        line = line_in(error, type(stage).__module__)
        at = f", at {line}" if line else ""
        found = [Problem(message=f"check of {use} failed: {type(error).__name__}: {error}{at}")]
    foreign = dict.fromkeys(type(one).__name__ for one in found if not isinstance(one, Problem))
    problems = [one for one in found if isinstance(one, Problem)]
    problems += [
        Problem(message=f"check of {use} yields {kind} instead of Problem") for kind in foreign
    ]
    return [_placed(problem, slot, places) for problem in problems]


def _placed(problem: Problem, slot: str, places: SourceMap) -> Problem:
    parts = [int(part) if part.isdecimal() else part for part in problem.key.split(".") if part]
    location = problem.location or places.value(("stages", slot, *parts))
    if not parts and problem.location is None:
        location = places.key(("stages", slot))
    return replace(problem, key=".".join([slot, *map(str, parts)]), location=location)
