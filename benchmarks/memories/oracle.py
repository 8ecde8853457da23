"""The oracle of memory plans: the engine of a recipe, run on tensors without values.

This process is one rank of all, in a group that sends nothing, and each tensor's memory is tracked.
Two optimizer steps are run, as the first makes the optimizer's state.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memories.replica import TracedReplica
from pipeline import (
    Engine,
    LossParts,
    MicroBatch,
    ModelSource,
    Objective,
    OptimizerPlan,
    Precision,
    Scores,
    TensorReader,
    TensorSpec,
)
from pipeline.chain.artifacts import Results
from pipeline.distributed.environment import ON_LOOPBACK
from pipeline.planning.forecast import BACKWARD, FORWARD, RESUME, SAVE, UPDATE, Held
from pipeline.planning.planner import Job, TraceScope, planned
from pipeline.planning.trace.run import context, declare, model_errors_as_ours
from pipeline.planning.trace.torch_compat import silent_group, storage_key
from pipeline.planning.trace.tracker import MemoryTracker, offloading
from pipeline.utils.tensors import without_values
from stages.objectives.cross_entropy import CrossEntropy
from stages.optimizer.adamw import AdamW
from stages.planners import LOW_BIT, batch_of_zeros
from stages.planners import without_values as runnable
from stages.wrap.ddp import Ddp

MICROBATCHES = 3
"""Micro-batches to run; further ones are like the last but one."""
TENSORS = "tensors"


def step_peaks(job: Job) -> dict[str, Held]:
    """Return the peak of the device's memory by phase, of the fullest rank of a pipeline."""
    stages = 1 if job.division is None else job.division.stages
    ranks = range(0, job.topology.ranks, job.topology.ranks // stages)
    every = [_alone(job, rank) for rank in ranks]
    phases = dict.fromkeys(phase for peaks in every for phase in peaks)
    return {
        phase: max((peaks[phase] for peaks in every if phase in peaks), key=lambda one: one.bytes)
        for phase in phases
    }


def _alone(job: Job, rank: int) -> dict[str, Held]:
    """Run a rank in a thread of its own, as torch's caches of meshes know one rank."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run, job, rank=rank).result()


def run(job: Job, *, fake: bool = True, rank: int = 0) -> dict[str, Held]:
    """Run two steps of one rank; return the peak of the device's memory by phase. Without `fake`,
    tensors are real. Raises StageError for a model that needs values."""
    tracker = ResizedTracker(fake=fake)

    def phase(name: str) -> None:
        tracker.enter(name)

    with contextlib.ExitStack() as stack:
        ctx = stack.enter_context(context(job, rank))
        ranks = job.topology.ranks
        real = not fake and ranks == 1
        stack.enter_context(single_group() if real else silent_group(ranks, rank))
        results = Results.of(job.topology, job.samples, TraceScope())
        source = declare(job, results, ctx)
        results |= Results.of(with_zero_weights(source))
        for step in job.plan.slots:
            if issubclass(step.gives or object, OptimizerPlan):
                results[step.slot] = _optimizer(step.stage, results.call(step.stage, "run", ctx))
        stack.enter_context(offloading(tracker, job.topology.device))
        if fake:
            stack.enter_context(without_values())
        stack.enter_context(tracker)
        stack.enter_context(model_errors_as_ours())
        for step in job.plan.slots:
            if issubclass(step.gives or object, Engine):
                replicates = fake and isinstance(step.stage, Ddp)
                maker = Replicas(step.stage) if replicates else step.stage
                results[step.slot] = results.call(maker, "run", ctx)
        engine: Engine = results.require(Engine, "nothing wraps the model")
        once = tracker.once if fake else lambda _, function: function()
        _train(job, engine, results.require(OptimizerPlan, "nothing updates it"), phase, once)
    found: dict[str, int] = {}
    for one in tracker.stretches:
        most = max(level.device for level in one.levels)
        found[one.phase] = max(most, found.get(one.phase, 0))
    return {phase: Held.of({TENSORS: size}) for phase, size in found.items()}


def _train(
    job: Job, engine: Engine, optimizer: OptimizerPlan, phase: Callable[[str], None],
    once: Callable[[Any, Callable[[], Any]], Any],
) -> None:  # fmt: skip
    """Take two steps as `TrainStep` takes them."""
    step, train = job.step, planned(job.plan)
    assert step is not None
    assert train is not None
    batch = batch_of_zeros(step.micro_batch, job.samples)
    objective = Watched(CrossEntropy(train.stage.loss_chunk_size), phase)
    pipelined = job.topology.stages > 1
    # A pipeline keeps several micro-batches at a time: which ones depends on their number.
    counts = (1, step.microbatches if pipelined else min(step.microbatches, MICROBATCHES))
    with (
        runnable(job.samples, once),
        _phases_marked(engine.parts, phase, pipelined=pipelined),
    ):
        for count in counts:
            engine.accumulate([batch] * count, objective, counts={"targets": step.tokens})
            phase(UPDATE)
            engine.step(lr_scales=optimizer.lr_scales(1, 2), should_step=lambda norm: True)
    for name in (SAVE, RESUME):  # with the memory between steps
        phase(name)


@contextlib.contextmanager
def _phases_marked(
    parts: Sequence[nn.Module], phase: Callable[[str], None], *, pipelined: bool
) -> Iterator[None]:
    """Mark the beginning of each forward pass in the body, and of each backward pass of a stage."""

    def before(*_: Any) -> None:
        phase(FORWARD)

    def after(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: phase(BACKWARD))

    hooks = [one.register_forward_pre_hook(before, prepend=True) for one in parts]
    hooks += [one.register_forward_hook(after) for one in parts if pipelined]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Watched:
    """An objective after which backward begins."""

    def __init__(self, objective: Objective, phase: Callable[[str], None]) -> None:
        self.request, self.units = objective.request, objective.units
        self.metrics = objective.metrics
        self._objective, self._phase = objective, phase

    def __call__(self, scores: Scores, batch: MicroBatch) -> LossParts:
        parts = self._objective(scores, batch)
        self._phase(BACKWARD)
        return parts


class Replicas:
    """Stands for `wrap.ddp`, whose engine reads addresses."""

    def __init__(self, stage: Ddp) -> None:
        self._stage = stage

    def run(
        self, ctx: Any, model: ModelSource, precision: Precision, optimizer: OptimizerPlan
    ) -> Engine:
        """Return the replica."""
        return TracedReplica(self._stage, ctx, model, precision, optimizer)


def _optimizer(stage: Any, plan: OptimizerPlan) -> OptimizerPlan:
    """Replace compiled updates, which need values."""
    if not isinstance(stage, AdamW) or stage.algorithm == "adamw" or stage.kernel != "fused":
        return plan
    taken = LOW_BIT[stage.moments][1]
    (part,) = plan.parts
    return replace(plan, parts=[replace(part, build=functools.partial(_taking, taken, part.build))])


def _taking(size: float, build: Callable[..., Any], groups: list[dict[str, Any]]) -> Any:
    """Return an optimizer whose compiled updates only allocate `size` bytes per element of a
    parameter."""
    optimizer = build(groups)
    optimizer.compiled = lambda weights, *given, **named: torch.empty(
        round(size * weights.numel()), dtype=torch.uint8
    )
    return optimizer


class ResizedTracker(MemoryTracker):
    """Counts storages that are resized too, as `fully_shard` does."""

    def __enter__(self) -> MemoryTracker:
        original = self._resize = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            done = original(storage, size)
            key = storage_key(storage)
            if key in self._sizes:
                self._change(key, size)
            return done

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize


@contextlib.contextmanager
def single_group() -> Iterator[None]:
    """Make this process a group of its own in the body, which really sends:
    DistributedDataParallel needs the results of its collectives."""
    os.environ |= ON_LOOPBACK
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def with_zero_weights(source: ModelSource) -> ModelSource:
    """Return a copy of a source, whose weights are zeros and are not read."""
    same = copy.copy(source)
    same.weights = ZeroReader
    return same


class ZeroReader(TensorReader):
    """Reads zeros: with uninitialised memory, gradients might not be finite, and some strategies
    leave such updates out."""

    as_stored = True

    def names(self) -> Collection[str]:
        return ()

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(shape=(), dtype=torch.float32)

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        return iter(())

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        out.zero_()
