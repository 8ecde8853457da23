"""The recipe of each run of a benchmark: a recipe's own, up to its training, cut to a few steps."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pydantic import ValidationError

from pipeline.bench.results import Row
from pipeline.contracts.engine import Engine
from pipeline.contracts.stage import Trial
from pipeline.contracts.training import TrainedRun
from pipeline.errors import UsageError
from pipeline.hardware.host import cores_each
from pipeline.plan.plan import Plan, PlannedSlot
from pipeline.plan.registry import Registry
from pipeline.planning.presets import Strategy
from pipeline.recipe.dump import render
from pipeline.recipe.field_docs import plain_value
from pipeline.recipe.fields import adapter


@dataclass(frozen=True, kw_only=True)
class BenchLength:
    """How far each run goes."""

    steps: int
    """Measured ones."""
    warmup: int
    """Steps before them."""
    weak: bool
    """Whether samples per process stay as in the recipe, instead of the global batch."""

    def trial(self, procs: int, *, own: int, most: int) -> Trial:
        """On `procs` processes, where the recipe is for `own` and the benchmark goes to `most`. One
        more step is profiled, after the others, as a profiler costs time and memory."""
        last = self.warmup + self.steps + 1
        if self.weak:
            return Trial(steps=last, profile=(last,), growth=Fraction(procs, own), procs=own)
        return Trial(steps=last, profile=(last,), procs=max(own, most))


@dataclass(frozen=True, kw_only=True)
class Written:
    """A run that is to come."""

    row: Row
    """What it is, without numbers."""
    text: str
    """Its recipe."""


def require_measurable(plan: Plan) -> None:
    """Raises UsageError for a recipe that wraps nothing, or whose training cannot be cut short."""
    wrap_of(plan)
    for_benchmark(plan, Trial(steps=1))


def require_unchanged(plan: Plan, overrides: Sequence[str]) -> None:
    """Raises UsageError for an override of the slot that strategies take the place of."""
    slot = wrap_of(plan).slot
    for override in overrides:
        if override.partition("=")[0].partition(".")[0] == slot:
            raise UsageError(
                f"`{override}` has no effect: --strategies replaces the slot `{slot}`",
                hint="leave out one of the two",
            )


def own_strategy(plan: Plan) -> Strategy:
    """The recipe's wrap slot."""
    step = wrap_of(plan)
    fields = {k: v for k, v in as_written(plan)[step.slot].items() if k != "use"}
    return Strategy(name=step.use, use=step.use, fields=fields)


def write(
    plan: Plan,
    strategies: Sequence[Strategy],
    counts: Sequence[int],
    length: BenchLength,
    *,
    registry: Registry,
) -> list[Written]:
    """The recipe under each strategy on each number of processes. Raises UsageError where samples
    per process are to stay and cannot."""
    most = max(counts)
    return [
        _write(plan, strategy, procs, length, most=most, registry=registry)
        for strategy in strategies
        for procs in counts
    ]


def _write(
    plan: Plan,
    strategy: Strategy,
    procs: int,
    length: BenchLength,
    *,
    most: int,
    registry: Registry,
) -> Written:
    trial = length.trial(procs, own=plan.view.procs, most=most)
    slots = for_benchmark(plan, trial)
    slots[wrap_of(plan).slot] = another(strategy.slot, trial, registry)
    content = plan.recipe.public()
    launch = {"procs": procs, "device": plan.view.device, "threads": threads(plan, most)}
    head = {"name": plan.recipe.name, "seed": plan.recipe.seed, "launch": launch}
    env = {"env": content["env"]} if content.get("env") else {}
    row = Row(strategy=strategy.name, use=strategy.use, procs=procs)
    return Written(row=row, text=render({**head, **env, "stages": slots}))


def threads(plan: Plan, most: int) -> int | None:
    """CPU threads of every process, `most` being the largest number of them: on CPUs the same for
    any number, else a single process would have all the cores and nothing could scale. None leaves
    it to the launcher."""
    given = plan.recipe.launch.threads
    if given is not None or plan.view.device != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return given
    return cores_each(most)


Slot = Mapping[str, Any]
"""`use` and fields, as a recipe has them."""
METHOD = "for_benchmark"


def wrap_of(plan: Plan) -> PlannedSlot:
    """The slot that wraps. Raises UsageError without one."""
    for step in plan.steps:
        if step.gives is not None and issubclass(step.gives, Engine):
            return step
    raise UsageError(f"recipe `{plan.recipe.name}` has no slot that wraps the model in a strategy")


def as_written(plan: Plan) -> dict[str, Slot]:
    """All of the recipe."""
    slots: dict[str, Slot] = plan.recipe.public()["stages"]
    return slots


def for_benchmark(plan: Plan, trial: Trial) -> dict[str, Slot]:
    """Slots up to the one that trains, changed for a benchmark where their planners say how. Raises
    UsageError where none trains, or the one that does cannot be changed."""
    found, written = {}, as_written(plan)
    for step in plan.steps:
        trains = step.gives is not None and issubclass(step.gives, TrainedRun)
        if trains and not hasattr(step.stage, METHOD):
            raise UsageError(f"{step.use} cannot be cut to a few steps: it has no `{METHOD}`")
        found[step.slot] = _shortened(written[step.slot], step.stage, trial)
        if trains:
            return found
    raise UsageError(f"recipe `{plan.recipe.name}` has no slot that trains")


def another(slot: Slot, trial: Trial, registry: Registry) -> Slot:
    """A slot that is to take the place of one of the recipe's, changed for a benchmark if it can
    be. Mistakes in it are found when the run is planned."""
    kind = registry.load(slot["use"])
    if not hasattr(kind, METHOD):
        return slot
    fields = {name: value for name, value in slot.items() if name != "use"}
    try:
        stage = adapter(kind).validate_json(json.dumps(fields), strict=True)
    except ValidationError:
        return slot
    return _shortened(slot, stage, trial)


def _shortened(slot: Slot, stage: Any, trial: Trial) -> Slot:
    if not hasattr(stage, METHOD):
        return slot
    return {"use": slot["use"], **plain_value(getattr(stage, METHOD)(trial))}
