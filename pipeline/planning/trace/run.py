"""Run a recipe's stages as far as training steps, on tensors without memory."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.artifacts import Data, ModelSource, OptimizerPlan, Precision, TrainedRun
from pipeline.dist import Dist
from pipeline.engine import Engine
from pipeline.errors import PipeError, StageError, UsageError
from pipeline.fake_tensors import told_apart, without_values
from pipeline.metrics import Metrics
from pipeline.plan import Step
from pipeline.planning.job import Job
from pipeline.planning.planner import Extent, PhaseListener, Results, needs_of
from pipeline.planning.trace.bare_model import BareEngine, with_zero_weights
from pipeline.planning.trace.marks import Marks
from pipeline.planning.trace.structure import Structure, structure
from pipeline.planning.trace.torch_compat import silent_group, single_group
from pipeline.planning.trace.tracker import MemoryTracker, Stretch, offloading
from pipeline.stage import Context

DECLARATIONS = (ModelSource, Precision, OptimizerPlan)
WHOLE = Extent()
TRACE = "trace"
"""The method of planners that stands for a stage's `run`."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A model that was run, and what it took."""

    source: ModelSource
    built: Structure
    """The model that was run, which may have fewer blocks than the recipe's."""
    stretches: Sequence[Stretch]
    names: Mapping[str, str]
    """Parameter -> the one that it is tied to, or itself. Empty for a model in a strategy."""


def declared(job: Job) -> ModelSource:
    """The model that a recipe declares, in full depth. Raises UsageError where none is."""
    with _context(job) as ctx:
        return _Stages(job, WHOLE, ctx).declare()


def run(job: Job, extent: Extent = WHOLE, *, fake: bool = True, bare: bool = False) -> Traced:
    """Training steps of rank 0. Without `fake`, on real tensors, by the engines that train; with
    `bare`, without a strategy. Raises UsageError where nothing is trained, and StageError where
    values are needed."""
    tracker = MemoryTracker(fake=fake)
    marks = Marks(tracker)
    names: Mapping[str, str] = {}
    with contextlib.ExitStack() as stack:
        ctx = stack.enter_context(_context(job))
        if not bare:
            ranks = job.topology.ranks
            alone = single_group() if not fake and ranks == 1 else silent_group(ranks)
            stack.enter_context(alone)
        stages = _Stages(job, extent, ctx)
        stages.results["listener"] = marks
        source = stages.declare()
        # Before a strategy changes the classes of modules.
        built = structure(source)
        stages.results["unread"] = with_zero_weights(source)
        stack.enter_context(told_apart())
        stack.enter_context(offloading(tracker, job.topology.device))
        if fake:
            stack.enter_context(without_values())
        stack.enter_context(tracker)
        stack.enter_context(_explained())
        if bare:
            names = stages.leave_bare(marks)
        else:
            stages.wrap(fake=fake)
        stages.train(built.names, marks)
    return Traced(source=source, built=built, stretches=tracker.stretches, names=names)


@contextlib.contextmanager
def _context(job: Job) -> Iterator[Context]:
    """Inside, stages can run as rank 0 of all ranks, silently, in a folder of their own."""
    log = logging.getLogger("pipe.planning")
    log.addHandler(logging.NullHandler())
    log.propagate = False
    place = Dist(
        rank=0,
        world_size=job.topology.ranks,
        local_rank=0,
        local_world_size=job.topology.local_ranks,
        device=torch.device("cpu"),
    )
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        yield Context(
            run_dir=Path(scratch), seed=job.plan.view.seed, dist=place, log=log,
            metrics=Metrics(None), on_exit=stack.callback,
        )  # fmt: skip


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Inside, any error of a model's own code is a StageError."""
    try:
        yield
    except PipeError:
        raise
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise StageError(
            f"the model cannot be run on tensors without values: {first}",
            hint="if it trains all the same, `pipe bench` measures what it takes",
        ) from error


def trainers(job: Job) -> Sequence[Any]:
    """Planners of the slots that train. Raises UsageError if there are none, or if one of them has
    no trace: its memory would be left out."""
    found = []
    for step in job.plan.steps:
        planner = job.planners.get(step.slot)
        trains = issubclass(step.gives or object, TrainedRun) and any(
            need.type is Data for need in needs_of(step.stage, "run")
        )
        if _listens(planner):
            found.append(planner)
        elif trains:
            raise UsageError(
                f"this recipe cannot be traced: what trains in {step.slot}, {step.use}, has no "
                "trace"
            )
    if not found:
        raise UsageError("nothing is trained that could be traced", hint="give it a train slot")
    return found


def _listens(planner: Any) -> bool:
    return hasattr(planner, TRACE) and any(
        need.type is PhaseListener for need in needs_of(planner, TRACE)
    )


class _Stages:
    """A recipe's stages while they run."""

    def __init__(self, job: Job, extent: Extent, ctx: Context) -> None:
        self.results = Results(topology=job.topology, samples=job.samples, extent=extent)
        self._job = job
        self._ctx = ctx

    def declare(self) -> ModelSource:
        """Run the stages that give declarations, whose tensors are real. Raises UsageError where
        no model is declared."""
        with _explained():
            self._run(DECLARATIONS)
        why = "nothing can be traced: no slot of the recipe gives a model"
        source: ModelSource = self.results.require(ModelSource, why)
        return source

    def wrap(self, *, fake: bool) -> None:
        """Run the stages that give an engine. Raises UsageError where none can without values."""
        self._run((Engine,), real=not fake)
        why = "the strategy cannot be traced, but it is planned without --trace"
        self.results.require(Engine, why)

    def leave_bare(self, marks: Marks) -> Mapping[str, str]:
        """Take the model without a strategy. Raises UsageError without a precision."""
        why = "nothing can be traced: no slot of the recipe gives a precision"
        precision: Precision = self.results.require(Precision, why)
        source: ModelSource = self.results.require(ModelSource, "")
        engine = BareEngine(source, precision, self._job.topology, marks)
        self.results["bare"] = engine
        return engine.names

    def train(self, names: Sequence[str], marks: Marks) -> None:
        """Run the stages that train; these modules are the model's blocks."""
        engine: Engine = self.results.require(Engine, "")
        blocks = [_within(engine.model, name) for name in names]
        with marks.watching(engine.model, blocks):
            for planner in trainers(self._job):
                self.results.call(planner, TRACE, self._ctx)

    def _run(self, gives: tuple[type, ...], *, real: bool = False) -> None:
        """Run the stages that give one of these: `trace` of their planners, if that is there and
        `real` is not asked for."""
        for step in self._job.plan.steps:
            if issubclass(step.gives or object, gives):
                planner = self._job.planners.get(step.slot)
                has_trace = hasattr(planner, TRACE) and not real
                if has_trace or real or gives is DECLARATIONS:
                    owner, method = (planner, TRACE) if has_trace else (step.stage, "run")
                    self._call(step, owner, method)

    def _call(self, step: Step, owner: Any, method: str) -> None:
        missing = [*self.results.missing(owner, method)]
        if missing:
            raise UsageError(f"slot `{step.slot}` cannot be traced without {missing[0]}")
        self.results[step.slot] = self.results.call(owner, method, self._ctx)


def _within(model: nn.Module, name: str) -> nn.Module:
    """The module of that name in a model, which a strategy may have put into another one."""
    named: dict[str, nn.Module] = dict(model.named_modules())
    return next(one for found, one in named.items() if f".{found}".endswith(f".{name}"))
