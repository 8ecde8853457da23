"""A planner: what planning and benchmarking ask of a stage, registered beside it.

A planner is a class with an entry point in the group `pipe.planners`, under the stage's name. It
derives from `Planner`, and may have two methods more, whose further parameters are annotated, as
those of `run` are, with what they need of the slots before:

- `forecast(self, topology, ...)`: what the stage will need;
- `trace(self, ctx, ...)`: the stage's `run` for tensors without values.

Importing a planner imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pipeline.contracts.training import TrainedRun
from pipeline.errors import UsageError
from pipeline.plan.binding import Results
from pipeline.plan.registry import Plugins
from pipeline.planning.shapes import SampleShape, Step

if TYPE_CHECKING:
    from pipeline.plan.plan import Plan

FORECAST = "forecast"
S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Number of ranks and nodes of a run, and its device."""

    ranks: int
    """Processes over all nodes, one a device, and of one node."""
    local_ranks: int
    device: str
    """`cpu` or `cuda`."""

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.ranks // self.local_ranks)

    @property
    def on_node(self) -> int:
        """Processes of the fullest node."""
        return min(self.local_ranks, self.ranks)


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Part of a training that is run: the first `blocks` blocks of the model (None: all), and one
    micro-batch of `samples` samples (None: two steps of the recipe). `phase` is called with the
    name of each phase when it begins."""

    blocks: int | None = None
    samples: int | None = None
    phase: Callable[[str], None] = lambda name: None


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A change of a stage's own fields with which a step needs less memory."""

    order: int
    """Position in the order in which savings are tried, over all stages; equal for savings of one
    kind."""
    what: str
    fields: Mapping[str, Any]
    beside: Mapping[type, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Fields of other slots that go with it, by the type that the slot gives."""


CHUNK, SMALLER, REDUCE, RECOMPUTE = 1, 2, 3, 4
"""Orders of savings that cost time alone: logits in chunks, smaller micro-batches, gradients
reduced more often, activations computed again, which costs the most."""
NARROW_MOMENTS, NARROW_MASTERS, NARROW_FROZEN = 5, 6, 7
"""Orders of those that change what is computed, each tried only where those before do not do:
moments, master weights, frozen weights in fewer bits."""


class Tier:
    """Positions in the order in which strategies are tried: faster ones, which need more memory,
    first. Those from OFFLOADED on are tried one by one, only when none before them fits."""

    REPLICATED = 10
    SHARDED_WITHIN_NODES = 20
    """Sharded across nodes only."""
    PARTLY_SHARDED = 30
    """Gathered once a step."""
    SHARDED = 40
    OFFLOADED = 50
    MORE_OFFLOADED = 55
    OFFLOADED_TO_DISK = 60


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A way to use a stage that wraps."""

    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the slot."""
    what: str = ""
    """Short description, as in `every rank holds everything`."""
    order: int = 0
    """Position in the order in which `pipe advise` tries strategies
    (`Tier`); 0: never tried."""
    at_first: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further fields that `pipe advise` begins with; its planner's `savings` take them back."""


Presets = Mapping[str, Preset]
"""Presets by name."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A few steps of a recipe, to be measured: no evaluation, and one checkpoint, at the end."""

    steps: int
    """Optimizer steps in all."""
    profile: tuple[int, ...] = ()
    """Steps among them that torch.profiler records."""
    growth: Fraction = Fraction(1)
    """Samples of one optimizer step, in multiples of the recipe's."""
    procs: int = 1
    """World size used for defaults that depend on it (e.g. the micro-batch), so that compared
    trials share them."""

    def grown(self, samples: int) -> int:
        """Samples of one optimizer step of the trial, from those of the recipe. Raises UsageError
        where they are no whole number."""
        grown = samples * self.growth
        if grown.denominator != 1:
            raise UsageError(
                f"samples per process cannot stay: {samples} samples a step x {self.growth} would "
                f"be {float(grown):g}",
                hint="--weak needs a global batch that divides evenly",
            )
        return int(grown)


class Planner(Generic[S]):
    """Forecasts of a stage, made with the checked stage. The base class stands for a stage that
    needs nothing worth counting beside a step."""

    def __init__(self, stage: S) -> None:
        self.stage = stage

    def depends(self) -> Mapping[str, Any]:
        """The settings of the stage on which a profile of the model depends, all if not results."""
        stage: Any = self.stage
        return dataclasses.asdict(stage)

    def savings(self, ranks: int) -> Iterable[Saving]:
        """Changes of the stage's fields with which a step on `ranks` ranks needs less memory."""
        return ()

    def for_benchmark(self, trial: Trial) -> S:
        """The stage with the settings of a trial: a stage that trains takes `trial.steps` steps and
        evaluates nothing, one that saves does so once and into the run's folder. Without this
        method a stage that trains cannot be measured, and others are left as they are."""
        return self.stage

    @classmethod
    def presets(cls) -> Presets:
        """Strategies by name, of a stage that wraps a model."""
        return {}


class Planners(Plugins[type[Planner[Any]]]):
    """Planner classes by stage."""

    group = "pipe.planners"
    noun = "planner of stage"

    def fault(self, loaded: Any) -> str:
        """The first thing that a class lacks to be a planner."""
        return "" if isinstance(loaded, type) and issubclass(loaded, Planner) else "is no Planner"

    def find(self, use: str) -> type[Planner[Any]] | None:
        """The planner's class of a stage; None for one without. Raises PluginError naming the
        package that is at fault."""
        return self.load(use) if use in self else None

    def of(self, plan: Plan) -> dict[str, Any]:
        """Slot -> the planner of its stage, for slots whose stages have one."""
        found = {step.slot: (self.find(step.use), step.stage) for step in plan.steps}
        return {slot: kind(stage) for slot, (kind, stage) in found.items() if kind is not None}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked recipe on a topology, its slots' planners, and what is known before the model is
    profiled: its samples, and how a step is cut into micro-batches."""

    plan: Plan
    topology: Topology
    planners: Mapping[str, Any]
    samples: SampleShape
    step: Step | None

    @classmethod
    def of(cls, plan: Plan, topology: Topology) -> Job:
        """Prepare the job of a recipe. Raises UsageError where no slot forecasts the length of its
        samples, and where a slot trains without a planner."""
        planners = Planners.installed().of(plan)
        for one in plan.steps:
            if issubclass(one.gives or object, TrainedRun) and one.slot not in planners:
                who = f"slot `{one.slot}` ({one.use})"
                raise UsageError(f"this recipe cannot be planned: {who} has no forecast")
        results = forecasts(plan, topology, planners, Results())
        why = "nothing can be planned: no slot of the recipe tells the length of its samples"
        samples, step = results.require(SampleShape, why), results.latest(Step)
        return cls(plan=plan, topology=topology, planners=planners, samples=samples, step=step)


def forecasts(
    plan: Plan, topology: Topology, planners: Mapping[str, Any], known: Results
) -> Results:
    """Forecasts of planners by slot, after the results `known`, and one sentence for each slot
    without a forecast. Raises the planners' errors."""
    results, mute = Results(known), []
    for step in plan.steps:
        planner, named = planners.get(step.slot), f"slot `{step.slot}` ({step.use})"
        if planner is None:
            mute.append(f"{named} has no forecast")
        elif hasattr(planner, FORECAST):
            missing = ", ".join(results.missing(planner, FORECAST))
            if missing:
                mute.append(f"{named} needs what no slot before it tells: {missing}")
            else:
                results[step.slot] = results.call(planner, FORECAST, topology)
    results |= Results.of(tuple(mute))
    return results
