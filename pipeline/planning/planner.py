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
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pipeline.contracts.training import TrainedRun
from pipeline.errors import UsageError
from pipeline.plan.binding import Results
from pipeline.plan.registry import Plugins
from pipeline.planning.shapes import SampleShape, Step

if TYPE_CHECKING:
    from pipeline.contracts.stage import Presets
    from pipeline.plan.plan import Plan

FORECAST = "forecast"
S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Where a run is to happen."""

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
    """How much of a training is run: the model's first so many blocks, or all; and one micro-batch
    of so many samples, or two steps as the recipe has them. `phase` is results when one begins."""

    blocks: int | None = None
    samples: int | None = None
    phase: Callable[[str], None] = lambda name: None


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A change of a stage's own fields with which a step needs less memory."""

    order: int
    """Which is tried first, over all stages; those of one kind have the same."""
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
    """Places in the order in which strategies are tried: the faster, which need more memory, first.
    Those from OFFLOADED on are tried only when none before them fits, one after another."""

    REPLICATED = 10
    SHARDED_WITHIN_NODES = 20
    """Only across nodes."""
    PARTLY_SHARDED = 30
    """Gathered once a step."""
    SHARDED = 40
    OFFLOADED = 50
    MORE_OFFLOADED = 55
    OFFLOADED_TO_DISK = 60


class Planner(Generic[S]):
    """Answers for a stage, made with the checked stage. As it is, it stands for one that needs
    nothing to speak of beside a step."""

    def __init__(self, stage: S) -> None:
        self.stage = stage

    def depends(self) -> Mapping[str, Any]:
        """The settings of the stage on which a profile of the model depends, all if not results."""
        stage: Any = self.stage
        return dataclasses.asdict(stage)

    def savings(self, ranks: int) -> Iterable[Saving]:
        """Changes of the stage's fields with which a step on so many ranks needs less memory."""
        return ()

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
    """A checked recipe, where it is to run, its slots' planners, and what these tell without a
    profile of the model: its samples, and how a step is cut."""

    plan: Plan
    topology: Topology
    planners: Mapping[str, Any]
    samples: SampleShape
    step: Step | None

    @classmethod
    def of(cls, plan: Plan, topology: Topology) -> Job:
        """The job of a recipe. Raises UsageError where no slot tells the length of its samples, and
        where one trains without a planner."""
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
    """Planners' answers by slot, behind what is known, and sentences, why the other slots tell
    nothing. Raises what planners raise."""
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
