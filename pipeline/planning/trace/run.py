"""A recipe's stages, run as far as training steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from pipeline.artifacts import Data, ModelSource, OptimizerPlan, Precision, TrainedRun
from pipeline.engine import Engine
from pipeline.errors import UsageError
from pipeline.fake_tensors import told_apart
from pipeline.plan import Plan, Step
from pipeline.planning.planner import Results, needs_of
from pipeline.planning.shapes import SampleShape
from pipeline.planning.timeline import Held
from pipeline.planning.topology import Topology
from pipeline.planning.trace.bare_model import BareEngine, with_zero_weights
from pipeline.planning.trace.meter import Meter, Moment
from pipeline.planning.trace.session import Session, session
from pipeline.planning.trace.structure import Structure, structure
from pipeline.planning.watch import Extent, Watch

DECLARATIONS = (ModelSource, Precision, OptimizerPlan)
WHOLE = Extent()
TRACE, PROFILE = "trace", "profile"
"""Methods of planners; `profile` runs what trains on a model without a strategy, where it is not
`trace` that does."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked recipe, its planners by slot, and where it is to run."""

    plan: Plan
    planners: Mapping[str, Any]
    topology: Topology
    samples: SampleShape
    model: str | None = None
    """All that the model's structure depends on; None where that is not known."""

    def trains(self, *, bare: bool) -> Sequence[tuple[Any, str]]:
        """Planners of the slots that train, and their methods. Raises UsageError if there are
        none, or one of them has no trace: what that one takes would be left out."""
        ways = (PROFILE, TRACE) if bare else (TRACE,)
        traced = {
            step.slot: (planner, method)
            for step in self.plan.steps
            for planner in [self.planners.get(step.slot)]
            for method in ways
            if self._watches(planner, method)
        }
        mute = [
            f"{step.slot}: {step.use}"
            for step in self.plan.steps
            if issubclass(step.gives or object, TrainedRun)
            and any(need.type is Data for need in needs_of(step.stage, "run"))
            and step.slot not in traced
        ]
        if mute or not traced:
            raise UsageError(
                f"this recipe cannot be traced: {', '.join(mute) or 'nothing is trained'}",
                hint="what trains there has no trace" if mute else "give it a train slot",
            )
        return list(traced.values())

    def _watches(self, planner: Any, method: str) -> bool:
        if not hasattr(planner, method):
            return False
        return any(need.type is Watch for need in needs_of(planner, method))


def declared(job: Job) -> ModelSource:
    """The model that a recipe declares, in full depth. Raises UsageError where none is."""
    with session(job.topology, seed=job.plan.view.seed, grouped=False) as here:
        return _Stages(job, Extent(), here).declare()


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A model that was run, and what it took."""

    source: ModelSource
    built: Structure
    """Of as many blocks as were run."""
    moments: Mapping[Moment, Held]
    bare: Mapping[str, str] | None
    """Names of the model's parameters, each with the one that it is tied to, where it was run
    without a strategy."""


def run(
    job: Job,
    *,
    extent: Extent = WHOLE,
    meter: Meter | None = None,
    fake: bool = True,
    bare: bool = False,
) -> Traced:
    """Training steps of rank 0. Without `fake`, on real tensors, by the engines that train; with
    `bare`, without a strategy. Raises UsageError where nothing is trained, and StageError where
    values are needed."""
    seed = job.plan.view.seed
    with session(job.topology, seed=seed, meter=meter, fake=fake, grouped=not bare) as here:
        stages = _Stages(job, extent, here)
        source = stages.declare()
        # By name: a strategy may change their classes.
        built = structure(source)
        stages.results["unread"] = with_zero_weights(source)
        with told_apart(), here.metering():
            if bare:
                stages.leave_bare()
            else:
                stages.wrap(fake=fake)
            stages.train(built.names)
    return Traced(source=source, built=built, moments=here.meter.moments, bare=stages.bare)


class _Stages:
    """A recipe's stages while they run."""

    def __init__(self, job: Job, extent: Extent, here: Session) -> None:
        self.results = Results(
            topology=job.topology, samples=job.samples, extent=extent, watch=here.watch
        )
        self.bare: Mapping[str, str] | None = None
        self._job = job
        self._here = here

    def declare(self) -> ModelSource:
        """Stages that give declarations, whose tensors are real; the model. Raises UsageError
        where none is declared."""
        for step in self._job.plan.steps:
            if issubclass(step.gives or object, DECLARATIONS):
                self._run(step)
        return self.results.require(
            ModelSource, "nothing can be traced: no slot of the recipe gives a model"
        )

    def wrap(self, *, fake: bool) -> None:
        """Stages that give an engine. Raises UsageError where none can without values."""
        for step in self._job.plan.steps:
            if issubclass(step.gives or object, Engine):
                self._run(step, real=not fake)
        self.results.require(Engine, "the strategy cannot be traced: it needs values")

    def leave_bare(self) -> None:
        """The model alone. Raises UsageError without a precision."""
        source = self.results.require(ModelSource, "")
        precision = self.results.require(
            Precision, "nothing can be traced: no slot of the recipe gives a precision"
        )
        engine = BareEngine(source, precision, self._job.topology, self._here.watch)
        self.bare = engine.names
        self.results["bare"] = engine

    def train(self, names: Sequence[str]) -> None:
        """The stage that trains; these modules are the model's blocks."""
        engine = self.results.require(Engine, "")
        blocks = [_within(engine.model, name) for name in names]
        self._here.watch.loaded(engine.model)
        with self._here.watch.watching(blocks):
            for planner, method in self._job.trains(bare=self.bare is not None):
                self.results.call(planner, method, self._here.ctx)

    def _run(self, step: Step, *, real: bool = False) -> None:
        planner = self._job.planners.get(step.slot)
        if hasattr(planner, TRACE) and not real:
            owner, method = planner, TRACE
        elif real or issubclass(step.gives or object, DECLARATIONS):
            owner, method = step.stage, "run"
        else:
            return
        missing = [*self.results.missing(owner, method)]
        if missing:
            raise UsageError(f"slot `{step.slot}` cannot be traced without {missing[0]}")
        self.results[step.slot] = self.results.call(owner, method, self._here.ctx)


def _within(model: nn.Module, name: str) -> nn.Module:
    """The module of that name in a model, which a strategy may have put into another one."""
    named: dict[str, nn.Module] = dict(model.named_modules())
    return next(one for found, one in named.items() if f".{found}".endswith(f".{name}"))
