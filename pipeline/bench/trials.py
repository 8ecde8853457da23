"""The recipe of each run of a benchmark: a recipe's own, up to its training, cut to a few steps."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.artifacts import Checkpoints, TrainedRun
from pipeline.bench.results import Row
from pipeline.chain import Link, inputs
from pipeline.engine import Engine
from pipeline.errors import UsageError
from pipeline.field_table import plain_value
from pipeline.plan import Plan, Step
from pipeline.presets import Strategy
from pipeline.recipe.render import render
from pipeline.registry import Registry
from pipeline.signature import needs
from pipeline.stage import Trial

METHOD = "shortened"
CHECKPOINT = "checkpoint.sharded"
"""Where the recipe's own checkpoints do not go with a strategy."""


@dataclass(frozen=True, kw_only=True)
class Length:
    """How far each run goes."""

    steps: int
    """Measured ones."""
    warmup: int
    """Steps before them."""
    weak: bool
    """Whether samples per process stay as in the recipe, instead of the global batch."""

    def trial(self, procs: int, recipe_procs: int) -> Trial:
        """One more step is profiled, after the others, as a profiler costs time and memory."""
        last = self.warmup + self.steps + 1
        growth = procs / recipe_procs if self.weak else 1.0
        return Trial(steps=last, profile=(last,), growth=growth)


@dataclass(frozen=True, kw_only=True)
class Written:
    """A run that is to come."""

    row: Row
    """What it is, without numbers."""
    text: str
    """Its recipe."""


def require_measurable(plan: Plan) -> None:
    """Raises UsageError for a recipe that wraps nothing, or whose training cannot be cut short."""
    _wrap(plan)
    _slots(plan, Trial(steps=1))


def own_strategy(plan: Plan) -> Strategy:
    """The recipe's wrap slot."""
    step = _wrap(plan)
    fields = {k: v for k, v in _content(plan)[step.slot].items() if k != "use"}
    return Strategy(name=step.use, use=step.use, fields=fields)


def write(
    plan: Plan,
    strategies: Sequence[Strategy],
    counts: Sequence[int],
    length: Length,
    *,
    registry: Registry,
) -> list[Written]:
    """The recipe under each strategy on each number of processes."""
    return [
        _write(plan, strategy, procs, length, most=max(counts), registry=registry)
        for strategy in strategies
        for procs in counts
    ]


def _write(
    plan: Plan, strategy: Strategy, procs: int, length: Length, *, most: int, registry: Registry
) -> Written:
    slots = _slots(plan, length.trial(procs, plan.view.procs))
    slots[_wrap(plan).slot] = strategy.slot
    note = _fit_checkpoints(slots, registry)
    content = plan.recipe.public()
    launch = {"procs": procs, "device": plan.view.device, "threads": threads(plan, most)}
    head = {"name": plan.recipe.name, "seed": plan.recipe.seed, "launch": launch}
    env = {"env": content["env"]} if content.get("env") else {}
    row = Row(strategy=strategy.name, use=strategy.use, procs=procs, note=note)
    return Written(row=row, text=render({**head, **env, "stages": slots}))


def threads(plan: Plan, most: int) -> int | None:
    """CPU threads of every process, `most` being the largest number of them: on CPUs the same for
    any number, else a single process would have all the cores and nothing could scale. None leaves
    it to the launcher."""
    given = plan.recipe.launch.threads
    if given is not None or plan.view.device != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return given
    return max(1, len(os.sched_getaffinity(0)) // most)


def _wrap(plan: Plan) -> Step:
    for step in plan.steps:
        if step.gives is not None and issubclass(step.gives, Engine):
            return step
    raise UsageError(f"recipe `{plan.recipe.name}` has no slot that wraps the model in a strategy")


def _content(plan: Plan) -> dict[str, dict[str, Any]]:
    """The slots as they are written."""
    slots: dict[str, dict[str, Any]] = plan.recipe.public()["stages"]
    return slots


def _slots(plan: Plan, trial: Trial) -> dict[str, dict[str, Any]]:
    """Up to the one that trains, those shortened that can be."""
    found, written = {}, _content(plan)
    for step in plan.steps:
        trains = step.gives is not None and issubclass(step.gives, TrainedRun)
        if hasattr(step.stage, METHOD):
            fields = plain_value(getattr(step.stage, METHOD)(trial))
            found[step.slot] = {"use": step.use, **fields}
        elif trains:
            raise UsageError(f"{step.use} cannot be cut to a few steps: it has no `{METHOD}`")
        else:
            found[step.slot] = written[step.slot]
        if trains:
            return found
    raise UsageError(f"recipe `{plan.recipe.name}` has no slot that trains")


def _fit_checkpoints(slots: dict[str, dict[str, Any]], registry: Registry) -> str:
    """Exchange a checkpoint slot that needs another engine than there is; says so."""
    links = list(_links(slots, registry))
    for index, link in enumerate(links):
        if link.gives and issubclass(link.gives, Checkpoints) and not _is_met(links, index):
            slots[link.slot] = {"use": CHECKPOINT}
            return f"{CHECKPOINT} in place of {link.use}, which does not go with it"
    return ""


def _links(slots: Mapping[str, Mapping[str, Any]], registry: Registry) -> Iterator[Link]:
    for slot, fields in slots.items():
        yield Link(slot=slot, use=fields["use"], kind=registry.load(fields["use"]))


def _is_met(links: Sequence[Link], index: int) -> bool:
    kind = links[index].kind
    assert kind is not None
    found = inputs(links, index)
    return all(need.optional or found[need.parameter] is not None for need in needs(kind))
