"""The recipe of each run of a benchmark: the user's, up to its training, cut to a few steps."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import click
from pydantic import ValidationError

from pipeline.chain.artifacts import training_slots
from pipeline.chain.plan import Plan, PlannedSlot
from pipeline.chain.registry import Registry
from pipeline.contracts.engine import Engine
from pipeline.contracts.stage import DividesRanks
from pipeline.contracts.training import TrainedRun
from pipeline.errors import UsageError
from pipeline.hardware.host import cores_each
from pipeline.planning.planner import Planner, Planners, Strategy, Trial
from pipeline.recipe.dump import render
from pipeline.recipe.fields import adapter, plain_value
from pipeline.recipe.load import reserved
from pipeline.recipe.nodes import RESERVED
from pipeline.track.stage import TrackerStage

Slot = Mapping[str, Any]  # `use` and fields, as in a recipe


@dataclass(frozen=True, kw_only=True)
class BenchLength:
    """Optimizer steps of each run. With `weak`, samples per process stay, not the global batch."""

    steps: int
    warmup: int
    weak: bool


@dataclass(frozen=True, kw_only=True)
class TrialRecipe:
    """A strategy on a number of processes, and the text of its run's recipe."""

    strategy: str
    use: str
    procs: int
    text: str


def require_measurable(plan: Plan, overrides: Sequence[str] = ()) -> None:
    """Raise UsageError for a recipe without a strategy, or whose training cannot be shortened; with
    strategies that replace the recipe's, also for one of the `overrides` that changes its slot."""
    slot = _wrap_slot(plan).slot
    shortened_slots(plan, Trial(steps=1))
    for override in overrides:
        if override.partition("=")[0].partition(".")[0] == slot:
            raise UsageError(
                f"`{override}` has no effect: --strategies replaces the slot `{slot}`",
                hint="leave out one of the two",
            )


def own_strategy(plan: Plan) -> Strategy:
    """The recipe's wrap slot as a strategy."""
    wrap = _wrap_slot(plan)
    fields = _fields(plan.recipe.public()["stages"][wrap.slot])
    return Strategy(name=wrap.use, use=wrap.use, fields=fields)


def write(
    plan: Plan,
    strategies: Sequence[Strategy],
    counts: Sequence[int],
    length: BenchLength,
    *,
    registry: Registry,
) -> list[TrialRecipe]:
    """The recipe under each strategy on each number of processes. One more step than measured is
    profiled at the end, as a profiler costs time and memory. Raises UsageError with `weak` for a
    batch that does not divide evenly."""
    content, most, own = plan.recipe.public(), max(counts), plan.view.procs
    head = {"name": plan.recipe.name, "seed": plan.recipe.seed}
    launch = {"device": plan.view.device, "threads": threads(plan, most)}
    env = {"env": content["env"]} if content.get("env") else {}
    last, recipes = length.warmup + length.steps + 1, []
    for strategy, procs in itertools.product(strategies, counts):
        shares = own if length.weak else max(own, most)
        stage = _stage(strategy.slot, registry)
        if isinstance(stage, DividesRanks):
            shares = stage.data_ranks(shares) or shares
        growth = Fraction(procs, own) if length.weak else Fraction(1)
        trial = Trial(steps=last, profile=(last,), growth=growth, shares=shares)
        stages, wrap = shortened_slots(plan, trial), _wrap_slot(plan).slot
        stages[wrap] = {**reserved(stages[wrap]), **replacement(strategy.slot, trial, registry)}
        recipe = {**head, "launch": {"procs": procs, **launch}, **env, "stages": stages}
        facts = {"strategy": strategy.name, "use": strategy.use, "text": render(recipe)}
        recipes.append(TrialRecipe(procs=procs, **facts))
    return recipes


def threads(plan: Plan, most: int) -> int | None:
    """CPU threads of every process: on CPUs, a share for `most` processes, since a single process
    with all cores could not scale. None leaves it to the launcher."""
    given = plan.recipe.launch.threads
    if given is not None or plan.view.device != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return given
    return cores_each(most)


def _wrap_slot(plan: Plan) -> PlannedSlot:
    engines = iter(plan.giving(Engine))
    wrap = plan.wrap_of(plan.trainings[0]) if plan.trainings else next(engines, None)
    if wrap is not None:
        return wrap
    raise UsageError(f"recipe `{plan.recipe.name}` has no slot that wraps the model in a strategy")


def _fields(slot: Slot) -> dict[str, Any]:
    return {name: value for name, value in slot.items() if name not in RESERVED}


def _stage(slot: Slot, registry: Registry) -> Any:
    """The stage of a slot; None for fields that it refuses: its plan finds mistakes."""
    try:
        return adapter(registry.load(slot["use"])).validate_json(json.dumps(_fields(slot)))
    except ValidationError:
        return None


def say_which(plan: Plan) -> None:
    """Say which training is measured of a recipe that has several."""
    first, *others = training_slots(plan.view.wiring) or [""]
    if others:
        click.echo(f"the recipe trains several times: `{first}` is measured", err=True)


def shortened_slots(plan: Plan, trial: Trial) -> dict[str, Slot]:
    """Slots up to the one that trains, shortened, without trackers: a benchmark is not a run of
    theirs. Raises UsageError if none trains, or it cannot be shortened."""
    found, written = {}, plan.recipe.public()["stages"]
    planners = Planners.installed()
    for planned in plan.slots:
        if isinstance(planned.stage, TrackerStage):
            continue
        kind = planners.find(planned.use) or Planner
        trains = issubclass(planned.gives or object, TrainedRun)
        if trains and kind.for_benchmark is Planner.for_benchmark:
            why = "its planner has no `for_benchmark`"
            raise UsageError(f"{planned.use} cannot be cut to a few steps: {why}")
        found[planned.slot] = _shortened(written[planned.slot], kind(planned.stage), trial)
        if trains:
            return found
    raise UsageError(f"recipe `{plan.recipe.name}` has no slot that trains")


def replacement(slot: Slot, trial: Trial, registry: Registry) -> Slot:
    """The slot of a strategy, shortened if it can be."""
    stage = _stage(slot, registry)
    planner = Planners.installed().find(slot["use"]) or Planner
    return slot if stage is None else _shortened(slot, planner(stage), trial)


def _shortened(slot: Slot, planner: Planner[Any], trial: Trial) -> Slot:
    stage = planner.for_benchmark(trial)
    return slot if stage is planner.stage else {**reserved(slot), **plain_value(stage)}


def profiled_recipe(plan: Plan, steps: Sequence[int]) -> str:
    """Return the recipe as text; `steps` are numbers from 1. Raises UsageError for one that does
    not train, or whose training cannot be shortened."""
    content = plan.recipe.public()
    shares = next((plan.view.data_ranks(train.stage) for train in plan.trainings), 1)
    trial = Trial(steps=max(steps), profile=tuple(steps), shares=shares)
    recipe = {**content, "stages": shortened_slots(plan, trial)}
    return render({key: value for key, value in recipe.items() if key != "dry_run"})
