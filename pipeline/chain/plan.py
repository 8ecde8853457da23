"""A recipe's stages loaded, validated and chained: a `Plan`, or every problem at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict, Unpack

from pipeline.chain.artifacts import training_of, training_slots, wrong_artifact
from pipeline.chain.elsewhere import Foreign, explained
from pipeline.chain.registry import Registry, line_in
from pipeline.chain.wiring import SlotType, missing_inputs, unread_results, wired, wrong_takes
from pipeline.contracts.engine import Engine
from pipeline.contracts.plan_view import Checked, PlanView
from pipeline.contracts.stage import NamesHub
from pipeline.contracts.training import TrainedRun
from pipeline.distributed.settings import Launch, ProcessCounts
from pipeline.errors import Location, PluginError, Problem, RecipeError, StageError, UsageError
from pipeline.hardware.gpus import gpu_count
from pipeline.recipe import Recipe, read_recipe, unless_reported
from pipeline.recipe.fields import build
from pipeline.recipe.load import with_values
from pipeline.recipe.nodes import KeyPath, MissingKey, UnknownKey
from pipeline.utils.hub import HubName, Known, commit_of, pins_asked
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

    def giving(self, kind: type) -> list[PlannedSlot]:
        """The slots that return an artifact of a type, in order."""
        return [one for one in self.slots if issubclass(one.gives or object, kind)]

    @property
    def trainings(self) -> list[PlannedSlot]:
        """The slots that train, in order."""
        return self.giving(TrainedRun)

    def wrap_of(self, train: PlannedSlot) -> PlannedSlot | None:
        """The slot that wraps the model for a slot that trains; None without one."""
        *_, first = None, *self.view.wiring.producers(train.slot, Engine)
        return next((planned for planned in self.slots if planned.slot == first), None)

    def of_training(self, training: str) -> Plan:
        """The part of the plan that is of one slot that trains: what it takes, however indirectly,
        and what follows from it and is of no other training."""
        wiring, trainings = self.view.wiring, training_slots(self.view.wiring)

        def taken(slot: str) -> set[str]:
            """The slot and those whose results reach it, other trainings left out."""
            givers = wiring.inputs[slot].values()
            return {slot}.union(*(taken(g) for g in givers if g is not None and g not in trainings))

        own, for_any = taken(training), set[str]().union(*map(taken, trainings))
        kept = [
            planned
            for planned in self.slots
            if planned.slot in own
            or (
                planned.slot not in for_any
                and (training_of(wiring, planned.slot) or trainings[0]) == training
            )
        ]
        slots = {planned.slot: planned.stage for planned in kept}
        return replace(self, slots=tuple(kept), view=replace(self.view, slots=slots))

    def until(self, last: str | None) -> Plan:
        """The plan without the slots after `last`. Raises UsageError for a slot that it lacks."""
        if not last:
            return self
        order = [planned.slot for planned in self.slots]
        if last not in order:
            raise UsageError(f"the recipe has no slot `{last}`", hint=did_you_mean(last, order))
        return replace(self, slots=self.slots[: order.index(last) + 1])

    def last_reader(self, slot: str) -> str | None:
        """The last slot that reads the result of `slot`, or another result in which it is."""
        return next(reversed([*self.view.wiring.readers(slot)]), None)


class How(TypedDict, total=False):
    """Options for making a plan."""

    for_this_machine: bool
    """Whether to ask whether this machine can run it too."""
    forecast: bool
    """Whether to leave out what only a run needs."""
    skip_checks: bool
    """Whether to leave out the stages' own checks, for a run that has passed them."""
    started: ProcessCounts | None
    """Numbers of processes that another launcher has already decided."""


def make_plan(recipe: Recipe, *, registry: Registry | None = None, **how: Unpack[How]) -> Plan:
    """Check all that can be checked before starting. Raises RecipeError with all problems."""
    known = registry or Registry.installed()
    plan, problems = _draft(recipe, known, incomplete=False, **how)
    if problems:
        raise RecipeError(in_order(explained(problems, recipe, known)))
    return plan


def plan_file(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    registry: Registry | None = None,
    foreign: Foreign | None = None,
    **how: Unpack[How],
) -> Plan:
    """`load_recipe` and `make_plan` in one, so that the problems of both come together. `foreign`
    knows keys of other programs."""
    known = registry or Registry.installed()
    recipe, problems = read_recipe(path, overrides, known.common_fields)
    if recipe is None:
        raise RecipeError(in_order(problems))
    astray = any(
        one.key == "stages"  # or a slot outside of it
        or (
            isinstance(one, UnknownKey)
            and len(one.path) == 1
            and isinstance(one.value, dict)
            and "use" in one.value
        )
        for one in problems
    )
    plan, more = _draft(recipe, known, incomplete=astray, **how)
    problems += unless_reported(more, problems)
    if problems:
        raise RecipeError(in_order(explained(problems, recipe, known, foreign)))
    return plan


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
        hint = "`pipe pin` writes its commit into the recipe"
        if Path(name.repo).is_dir():
            hint = f"for the folder of this name write ./{name.repo}; {hint}"
        message = branch if name.revision else f"{name.repo} names no commit"
        yield recipe.tree.problem(field_path(slot, key), message, hint, warning=True)


def field_path(slot: str, key: str) -> KeyPath:
    """Path of a slot's field in the recipe: of `sources.0.dataset` in the slot `data`,
    `("stages", "data", "sources", 0, "dataset")`."""
    parts = (int(part) if part.isdecimal() else part for part in key.split("."))
    return ("stages", slot, *parts)


def resolved(plan: Plan, known: Known, *, ask: bool = True) -> Plan:
    """The plan with the commit of each name of the hub in its fields, and in its recipe; without
    `ask`, only if it is `known`. Says each commit. Raises RecipeError where one cannot be found."""
    stages = dict(plan.view.slots)
    found: dict[KeyPath, tuple[HubName, str]] = {}
    problems = []
    for slot, name in hub_names(stages):
        if not name.pinned and (ask or name.asked in known):
            try:
                found[field_path(slot, name.key)] = name, commit_of(name, known)
            except StageError as error:
                path = field_path(slot, name.named_by)
                problems.append(plan.recipe.tree.problem(path, str(error)))
    if problems:
        raise RecipeError(problems)
    if not found:
        return plan
    origin = "the hub, {} at the start"
    values = {
        path: (commit, Location(file=origin.format(name.asked[2])))
        for path, (name, commit) in found.items()
    }
    recipe = with_values(plan.recipe, values)
    for slot, stage in plan.view.slots.items():
        if recipe.stages[slot] != plan.recipe.stages[slot]:
            fields, path = recipe.stages[slot].fields, ("stages", slot)
            stages[slot], wrong = build(type(stage), fields, tree=recipe.tree, path=path)
            if wrong:
                raise RecipeError(wrong)
    return replace(
        plan,
        recipe=recipe,
        view=replace(plan.view, slots=stages),
        slots=tuple(replace(planned, stage=stages[planned.slot]) for planned in plan.slots),
        hub=tuple(name.record(commit) for name, commit in found.values()),
    )


def require_sound(plan: Plan, kind: type) -> None:
    """Make the checks of stages of a kind that `skip_checks` left out. Raises RecipeError."""
    stages = {slot: stage for slot, stage in plan.view.slots.items() if isinstance(stage, kind)}
    problems = [one for one in _checked(plan.recipe, stages, plan.view) if not one.warning]
    if problems:
        raise RecipeError(in_order(problems))


def in_order(problems: Sequence[Problem]) -> list[Problem]:
    """Sort problems by their place in the files; those without a line come first."""
    return sorted(problems, key=lambda problem: problem.location or Location(file=""))


def load_slots(
    recipe: Recipe, registry: Registry
) -> tuple[list[SlotType], dict[str, Any], list[Problem]]:
    """Each slot's class, the stages of those without mistakes, and the mistakes."""
    links, stages, problems = list[SlotType](), dict[str, Any](), list[Problem]()
    for slot, spec in recipe.stages.items():
        kind, message, hint = None, "", ""
        try:
            if spec.use in registry:
                kind = registry.load(spec.use)
                message = wrong_artifact(kind, spec.use)
            elif spec.use:
                message, hint = f"there is no stage `{spec.use}`", registry.hint(spec.use)
            if message:
                kind = None  # of other slots nothing can be said
            elif kind is not None:
                path = ("stages", slot)
                stage, wrong = build(kind, spec.fields, tree=recipe.tree, path=path)
                stages |= {} if stage is None else {slot: stage}
                problems += wrong
        except PluginError as error:
            message = str(error)
        links.append(SlotType(slot=slot, use=spec.use, kind=kind, takes=spec.takes))
        if message:
            problems.append(recipe.tree.problem(("stages", slot, "use"), message, hint))
    return links, stages, problems


def _draft(
    recipe: Recipe, registry: Registry, *, incomplete: bool, **how: Unpack[How]
) -> tuple[Plan, list[Problem]]:
    """The plan as far as there is one, and the mistakes. Needs are not looked at in an `incomplete`
    recipe, some of whose slots stand elsewhere."""
    started, tree = how.get("started") or ProcessCounts(), recipe.tree
    links, stages, problems = load_slots(recipe, registry)
    wiring = wired(links)
    problems += wrong_takes(links, tree)
    if not incomplete:
        problems += missing_inputs(links, registry, tree)
    if not problems:
        problems += unread_results(links, wiring, tree)
    problems += recipe.replaced
    launch = recipe.launch
    gpus, nodes = gpu_count(), started.nodes or launch.nodes or 1
    device: str = launch.device
    if device == "auto":
        device = "cuda" if gpus or (launch.resources_per_worker or {}).get("GPU") else "cpu"
    per_node = launch.procs or started.per_node
    procs = started.procs or (launch.ranks if launch.engine else None)
    procs = procs or (per_node or (max(gpus, 1) if device == "cuda" else 1)) * nodes
    per_node = per_node or procs // nodes
    view = PlanView(
        name=recipe.name, seed=recipe.seed, procs=procs, device=device, slots=stages,
        wiring=wiring, forecast=how.get("forecast", False),
    )  # fmt: skip
    if not how.get("skip_checks"):
        found = [*_checked(recipe, stages, view)]
        problems += [*found, *_of_fewer(recipe, stages, view, {one.message for one in found})]
        if pins_asked():
            problems += [replace(one, warning=False) for one in unpinned(recipe, stages)]
    if not recipe.stages and not incomplete:
        message = "a recipe needs at least one stage"
        problems.append(tree.problem(("stages",), message, kind=MissingKey))
    wrong = impossible_here(launch, started) if how.get("for_this_machine") else None
    if wrong is not None:
        key, message, hint = wrong
        problems.append(tree.problem(("launch", key), message, hint))
    slots = tuple(
        PlannedSlot(
            slot=link.slot, use=link.use, stage=stages[link.slot],
            inputs=wiring.inputs[link.slot], gives=link.gives,
        )
        for link in links
        if link.slot in stages
    )  # fmt: skip
    warnings = tuple(in_order([problem for problem in problems if problem.warning]))
    plan = Plan(recipe=recipe, view=view, slots=slots, per_node=per_node, warnings=warnings)
    return plan, [problem for problem in problems if not problem.warning]


def _checked(recipe: Recipe, stages: Mapping[str, Any], view: PlanView) -> Iterator[Problem]:
    """Problems that the stages themselves find, with their places filled in."""
    for slot, stage in stages.items():
        found: list[Any] = []
        use = recipe.stages[slot].use
        try:
            found += stage.check(view) if isinstance(stage, Checked) else ()
        except Exception as error:
            line = line_in(error, type(stage).__module__)
            at = f", at {line}" if line else ""
            found = [Problem(message=f"check of {use} failed: {type(error).__name__}: {error}{at}")]
        foreign = dict.fromkeys(type(one).__name__ for one in found if not isinstance(one, Problem))
        yields = (f"check of {use} yields {kind} instead of Problem" for kind in foreign)
        own = [one for one in found if isinstance(one, Problem)]
        for problem in (*own, *(Problem(message=message) for message in yields)):
            parts = [int(p) if p.isdecimal() else p for p in problem.key.split(".") if p]
            path = ("stages", slot, *parts)
            place = recipe.tree.place(path) if parts else recipe.tree.key_place(path)
            key = ".".join([slot, *map(str, parts)])
            yield replace(problem, key=key, location=problem.location or place)


def _of_fewer(
    recipe: Recipe, stages: Mapping[str, Any], view: PlanView, known: set[str]
) -> Iterator[Problem]:
    """Mistakes of an elastic run at other sizes than its largest, whose messages are `known`: at
    the least, and with one worker more, where what has to divide the ranks does not."""
    fewest = recipe.launch.fewest if recipe.launch.engine else None
    if fewest is None:
        return
    for size in range(fewest, min(fewest + 2, view.procs)):
        for problem in _checked(recipe, stages, replace(view, procs=size)):
            if problem.message not in known and not problem.warning:
                known.add(problem.message)
                yield replace(problem, message=f"with {size} workers: {problem.message}")


def impossible_here(launch: Launch, started: ProcessCounts) -> tuple[str, str, str] | None:
    """Key of `launch`, message and hint where the recipe cannot run here, or as it was started; of
    an engine's cluster this machine knows nothing."""
    if launch.engine is not None:
        if started.procs is not None or started.nodes is not None:
            hint = "start the command once, without a launcher and --nodes"
            return "engine", "it starts all ranks, and so does a launcher", hint
        if find_spec(launch.engine) is None:
            hint = f"pip install 'pipetrain[{launch.engine}]'"
            return "engine", f"the package {launch.engine} is not installed", hint
        return None
    gpus, procs = gpu_count(), launch.procs or 1
    if launch.device == "cuda" and not gpus:
        hint = "use launch.device=cpu or auto"
        return "device", "this machine has no CUDA device", hint
    if launch.device != "cpu" and gpus and started.procs is None and procs > gpus:
        has = f"but this machine has {plural(gpus, 'GPU')}"
        hint = f"set launch.procs={gpus} and launch.nodes, or null to take as many as there are"
        return "procs", f"{plural(procs, 'process')} on each node, {has}", hint
    here = started.per_node or (started.procs if launch.nodes in (None, 1) else None)
    if launch.procs is not None and here not in (None, launch.procs):
        on = "" if launch.nodes in (None, 1) else " on each node"
        message = f"{plural(procs, 'process')}{on}, but the launcher started {here}"
        return "procs", message, f"set launch.procs={here}, or null to take as many as are started"
    nodes = started.nodes
    if nodes is None and started.procs is not None and (launch.procs or started.per_node):
        nodes = started.procs // (launch.procs or started.per_node or 1)
    if nodes is None and started.procs is None and (launch.nodes or 1) > 1:
        hint = "on every node: pipe run RECIPE --nodes NODES --node-rank NUMBER --rdzv HOST:PORT, "
        hint += "or have `pipe launch` write a script; or set launch.nodes=1"
        return "nodes", f"{launch.nodes} nodes, but this is one", hint
    if nodes is not None and launch.nodes not in (None, nodes):
        hint = f"set launch.nodes={nodes}, or null to take as many as there are"
        return "nodes", f"{launch.nodes} nodes, but {plural(nodes, 'node')} were started", hint
    return None
