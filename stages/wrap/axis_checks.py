"""Checks of the axes of parallelism against each other and the rest of a recipe."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline import PlanView, Problem, traits
from stages.model.config_checks import declarations
from stages.wrap.axes import (
    FIELDS,
    FOLDED,
    SEVERAL_STAGES,
    SPLIT_BACKWARD,
    ExpertParallel,
    PipelineParallel,
    axis_sizes,
)
from stages.wrap.config_checks import config_problems


def axis_problems(stage: Any, plan: PlanView) -> Iterator[Problem]:
    """Axes that do not divide the processes, or that nothing else allows."""
    yield from _pipeline_problems(stage, plan)
    divides_layers = getattr(stage, "tensor_parallel", None) is not None
    for model in declarations(stage, plan) if divides_layers else ():
        if isinstance(model, traits.NeedsWholeWeights):
            for message, hint in model.needs_whole_weights():
                yield Problem(key="tensor_parallel", message=message, hint=hint)
    if axis_sizes(stage).get("context", 1) > 1:
        why = "of all tokens of a micro-batch, and a rank has a slice of them"
        yield from _router_problems("context_parallel", why, stage, plan)
    yield from _expert_problems(getattr(stage, "expert_parallel", None))
    yield from config_problems(stage, plan)
    sizes, left = axis_sizes(stage), plan.procs
    for axis, size in sizes.items():
        if left % size:
            whole = "processes" if left == plan.procs else f"of {plan.procs} processes"
            message = f"{left} {whole} do not divide into groups of {size}"
            yield Problem(key=f"{FIELDS[axis]}.size", message=message)
            return
        left //= size


def _expert_problems(block: ExpertParallel | None) -> Iterator[Problem]:
    """Experts to be divided by a transformers that cannot, found without importing it."""
    spec = importlib.util.find_spec("transformers")
    folders = [] if spec is None else spec.submodule_search_locations or []
    divides = any(Path(one, "distributed", "expert_parallel.py").exists() for one in folders)
    if block is not None and not divides:
        message = "needs a newer transformers, whose models divide their experts among ranks"
        yield Problem(key="expert_parallel", message=message, hint="pip install -U transformers")


def _router_problems(key: str, why: str, stage: Any, plan: PlanView) -> Iterator[Problem]:
    """A router loss, which the axis of field `key` does not support because of `why`."""
    for train in plan.readers(stage):
        if isinstance(train, traits.AddsRouterLoss) and train.router_loss is not None:
            message = f"the train slot's router_loss is {why}"
            yield Problem(key=key, message=message, hint="leave out router_loss there")


def _split_backward_problems(schedule: str, stage: Any, plan: PlanView) -> Iterator[Problem]:
    """Settings that do not work with a backward in two halves, for inputs and later for weights."""
    why = f"{schedule} runs backward in two halves, for inputs and for weights, which"
    other = "or choose another schedule"

    def problem(what: str, hint: str) -> Problem:
        message = f"{why} {what} not allow"
        return Problem(key="pipeline_parallel.schedule", message=message, hint=f"{hint}, {other}")

    for model in declarations(stage, plan):
        if isinstance(model, traits.ChangesBlocks) and model.recomputes_operations:
            yield problem(
                "the model slot's activation_checkpointing.keep does",
                "set keep: nothing there",
            )
        if isinstance(model, traits.ChangesBlocks) and model.compile is not None:
            yield problem("compiled blocks do", "leave out compile in the model slot")
    for train in plan.readers(stage):
        if isinstance(train, traits.ChunksLoss) and train.loss_chunk_size is not None:
            yield problem("a loss in chunks does", "leave out loss_chunk_size in the train slot")


def _pipeline_problems(stage: Any, plan: PlanView) -> Iterator[Problem]:
    block: PipelineParallel | None = getattr(stage, "pipeline_parallel", None)
    if block is None:
        return
    folded = block.schedule in FOLDED
    if block.stages_per_rank is not None and block.schedule not in SEVERAL_STAGES:
        yield Problem(
            key="pipeline_parallel.stages_per_rank",
            message=f"{block.schedule} has one stage a rank",
            hint=f"leave it out, or choose {', '.join(SEVERAL_STAGES)}",
        )
    elif folded and block.per_rank != 2:
        message = "ZBVZeroBubble has two stages a rank"
        yield Problem(key="pipeline_parallel.stages_per_rank", message=message)
    if block.schedule in SPLIT_BACKWARD:
        yield from _split_backward_problems(block.schedule, stage, plan)
    why = "a mean over all layers, and a stage has some of them"
    yield from _router_problems("pipeline_parallel", why, stage, plan)
