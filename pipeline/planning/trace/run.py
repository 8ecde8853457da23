"""Run a recipe's stages up to training steps, on tensors without memory."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from pipeline.chain.binding import Results
from pipeline.contracts.engine import Engine
from pipeline.contracts.model import ModelSource
from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.contracts.precision import Precision
from pipeline.contracts.stage import Context
from pipeline.contracts.training import TrainedRun
from pipeline.distributed.process_group import DistContext
from pipeline.errors import PipeError, StageError, UsageError
from pipeline.execution.metrics import Metrics
from pipeline.planning.forecast import LOAD, Held
from pipeline.planning.planner import Job, TraceScope
from pipeline.planning.trace.marks import Marks
from pipeline.planning.trace.model import (
    BareEngine,
    Divided,
    Structure,
    structure,
    with_zero_weights,
)
from pipeline.planning.trace.torch_compat import silent_group, single_group
from pipeline.planning.trace.tracker import MemoryTracker, Stretch, offloading
from pipeline.utils.activities import activity
from pipeline.utils.fake_tensors import without_values

DECLARATIONS = (ModelSource, Precision, OptimizerPlan)
WHOLE = TraceScope()
TRACE, RUN = "trace", "run"
"""Methods: a planner's `trace` replaces its stage's `run`."""
TENSORS = "tensors, as traced"


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A model that was run, and its memory and work."""

    source: ModelSource
    built: Structure
    """The model that was run, which may have fewer blocks than the recipe's."""
    stretches: Sequence[Stretch]
    names: Mapping[str, str]
    """Parameter -> the parameter it is tied to, or itself. Empty for a model in a strategy."""
    divided: Divided
    """How the model was divided among ranks; not at all in a strategy."""
    deferred: Mapping[str, int]
    """Parameter -> bytes of gradients that a pipeline's backward in two halves keeps between them.
    Empty for a model in a strategy."""

    @property
    def peaks(self) -> dict[str, Held]:
        """Peak of the device's memory by phase."""
        found: dict[str, int] = {}
        for one in self.stretches:
            most = max(level.device for level in one.levels)
            found[one.position.phase] = max(most, found.get(one.position.phase, 0))
        return {phase: Held.of({TENSORS: size}) for phase, size in found.items()}


def declared(job: Job) -> ModelSource:
    """The model that a recipe declares, in full depth. Raises UsageError for a recipe without."""
    with _context(job, 0) as ctx:
        return _declare(job, Results.of(WHOLE), ctx)


def step_peaks(job: Job) -> dict[str, Held]:
    """Peak of the device's memory by phase, of the fullest rank of a pipeline."""
    stages = 1 if job.division is None else job.division.stages
    ranks = range(0, job.topology.ranks, job.topology.ranks // stages)
    with activity("tracing", len(ranks), "ranks") as tracing:
        every = list[dict[str, Held]]()
        for rank in ranks:
            every.append(_alone(job, rank).peaks)
            tracing.advance()
    phases = dict.fromkeys(phase for peaks in every for phase in peaks)
    return {
        phase: max((peaks[phase] for peaks in every if phase in peaks), key=lambda one: one.bytes)
        for phase in phases
    }


def _alone(job: Job, rank: int) -> Traced:
    """The trace of a rank in a thread of its own, as torch's caches of meshes know one rank."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run, job, rank=rank).result()


def run(
    job: Job, scope: TraceScope = WHOLE, *, fake: bool = True, bare: bool = False, rank: int = 0
) -> Traced:
    """Run training steps of one rank; without `fake`, on real tensors, with `bare`, without a
    strategy. Raises UsageError if nothing is trained, and StageError for a model that needs
    values."""
    tracker = MemoryTracker(fake=fake)
    marks = Marks(tracker)
    scope = replace(scope, phase=marks.phase)
    if fake:
        scope = replace(scope, once=tracker.once)
    results = Results.of(job.topology, job.samples, scope)
    with contextlib.ExitStack() as stack:
        ctx = stack.enter_context(_context(job, rank))
        if not bare or job.division is not None:
            ranks = job.topology.ranks
            real = not fake and ranks == 1
            stack.enter_context(single_group() if real else silent_group(ranks, rank))
        source = _declare(job, results, ctx)
        # Before a strategy changes the classes of modules.
        built = structure(source)
        results |= Results.of(with_zero_weights(source))
        stack.enter_context(offloading(tracker, job.topology.device))
        if fake:
            stack.enter_context(without_values())
        stack.enter_context(tracker)
        stack.enter_context(model_errors_as_ours())
        if bare:
            precision = results.require(Precision, "no slot of the recipe provides a precision")
            made = BareEngine(source, precision, job.topology, marks, job.division)
            results |= Results.of(made)
        else:
            _run(job, results, ctx, (Engine,), TRACE if fake else RUN)
        why = "the strategy cannot be traced, but it is planned without --trace"
        engine: Engine = results.require(Engine, why)
        if job.division is None or job.division.stages == 1 or bare:
            (model,) = engine.parts
            stack.enter_context(marks.watching(model, _blocks(model, built.names)))
        else:
            stack.enter_context(marks.watching_stages(engine.parts))
        _run(job, results, ctx, (TrainedRun,), TRACE)
        if tracker.stretches[-1].position.phase == LOAD:
            raise UsageError("nothing is trained that could be traced")
    alone = engine if isinstance(engine, BareEngine) else None
    return Traced(
        source=source,
        built=built,
        stretches=tracker.stretches,
        names=alone.names if alone else {},
        divided=alone.divided if alone else Divided(),
        deferred=alone.deferred if alone else {},
    )


@contextlib.contextmanager
def _context(job: Job, rank: int) -> Iterator[Context]:
    """Inside, stages can run as one rank of all, without a log, in a temporary folder."""
    log = logging.getLogger("pipe.planning")
    log.addHandler(logging.NullHandler())
    log.propagate = False
    place = DistContext(
        rank=rank,
        world_size=job.topology.ranks,
        local_rank=rank % job.topology.local_ranks,
        local_world_size=job.topology.local_ranks,
        device=torch.device("cpu"),
    )
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        yield Context(
            run_dir=Path(scratch), seed=job.plan.view.seed, dist=place, log=log,
            metrics=Metrics(None), on_exit=stack.callback,
        )  # fmt: skip


@contextlib.contextmanager
def model_errors_as_ours() -> Iterator[None]:
    """Raise any error of a model's own code, such as one that needs values, as StageError."""
    try:
        yield
    except PipeError:
        raise
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise StageError(
            f"the model cannot be run on tensors without values: {first}",
            hint="if it trains all the same, `pipe bench` measures its memory",
        ) from error


def _declare(job: Job, results: Results, ctx: Context) -> ModelSource:
    """Run the stages that give declarations, on real tensors."""
    with model_errors_as_ours():
        _run(job, results, ctx, DECLARATIONS, TRACE, RUN)
    return results.require(ModelSource, "no slot of the recipe provides a model to trace")


def _run(job: Job, results: Results, ctx: Context, gives: tuple[type, ...], *methods: str) -> None:
    """Run the stages that give one of these types, by the first of `methods` that each has. Raises
    UsageError for a stage that lacks an input."""
    for step in job.plan.steps:
        owners = {TRACE: job.planners.get(step.slot), RUN: step.stage}
        found = [(owners[method], method) for method in methods if hasattr(owners[method], method)]
        if found and issubclass(step.gives or object, gives):
            missing = results.missing(*found[0])
            if missing:
                raise UsageError(f"slot `{step.slot}` cannot be traced without {missing[0]}")
            results[step.slot] = results.call(*found[0], ctx)


def _blocks(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Blocks of these names in a model, which an engine may have put into another module."""
    named = {f".{name}": module for name, module in model.named_modules()}
    return [next(one for at, one in named.items() if at.endswith(f".{name}")) for name in names]
