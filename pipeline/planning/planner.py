"""A planner: what planning asks of a stage, registered beside it.

A planner is a class with an entry point in the group `pipe.planners`, under the stage's name. It is
made with the checked stage, and may have

- `forecast(self, topology, ...)`: what the stage will need, from what other slots have told;
- `trace(self, ctx, ...)`: the stage's `run` for tensors without values;
- `savings(self, ranks)`: changes of the stage's fields with which a step needs less memory;
- `presets(cls)`: strategies by name, of a stage that wraps a model;
- `depends(self)`: what a profile of the model depends on of the stage's settings, if not on all.

Further parameters of `forecast` and `trace` are annotated, as those of `run` are, with what they
need of the slots before: that is how they are found. Importing a planner imports no torch.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pipeline.errors import PluginError, UsageError
from pipeline.planning.shapes import SampleShape
from pipeline.registry import Entry, installed_entries, load_entry
from pipeline.signature import Need, needs

if TYPE_CHECKING:
    from pipeline.plan import Plan
    from pipeline.stage import Preset

GROUP = "pipe.planners"
FORECAST = "forecast"
S = TypeVar("S")
T = TypeVar("T")


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


class Planner(Generic[S]):
    """Answers for a stage; a base to derive from, of which nothing need be overridden. It stands
    for stages that need nothing to speak of beside a step."""

    def __init__(self, stage: S) -> None:
        self.stage = stage


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much of a training is run: the model's first so many blocks, or all; and one micro-batch
    of so many samples, or two steps as the recipe has them."""

    blocks: int | None = None
    samples: int | None = None


class PhaseListener(ABC):
    """Is told where a training is."""

    @abstractmethod
    def phase(self, name: str) -> None:
        """Hear that a phase begins."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A change of a stage's own fields with which a step needs less memory."""

    order: int
    """Which is tried first, over all stages; those of one kind have the same."""
    what: str
    fields: Mapping[str, Any]
    beside: Mapping[type, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Fields of other slots that go with it, by the type that the slot gives."""


REDUCE, RECOMPUTE, CHUNK, SMALLER = 1, 2, 3, 4
"""Orders of savings that cost time alone: gradients reduced more often, activations computed again,
logits in chunks, smaller micro-batches."""
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


class Planners:
    """Planner classes by stage, loaded when they are asked for."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._loaded: dict[str, Any] = {}

    @classmethod
    def installed(cls) -> Planners:
        """Planners that the installed packages register under `pipe.planners`."""
        return cls(installed_entries(GROUP))

    def find(self, use: str) -> Any | None:
        """The planner's class of a stage; None for one without. Raises PluginError naming the
        package that is at fault."""
        entry = self._entries.get(use)
        if entry is None:
            return None
        if use not in self._loaded:
            self._loaded[use] = load_entry(entry, GROUP, "the planner of stage")
        return self._loaded[use]

    def of(self, plan: Plan) -> dict[str, Any]:
        """Slot -> the planner of its stage, for slots whose stages have one."""
        found = {step.slot: (self.find(step.use), step.stage) for step in plan.steps}
        return {slot: kind(stage) for slot, (kind, stage) in found.items() if kind is not None}

    def presets(self, use: str) -> Mapping[str, Preset]:
        """Strategies that a stage offers by name. Raises PluginError for what is no preset."""
        from pipeline.stage import Preset

        kind: Any = self.find(use)
        told: Mapping[str, Preset] = {}
        if hasattr(kind, "presets"):
            try:
                told = kind.presets()
                wrong = [name for name, preset in told.items() if not isinstance(preset, Preset)]
                fault = f"`{wrong[0]}` is no Preset" if wrong else ""
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
            if fault:
                raise PluginError(f"presets of stage `{use}` of {self._entries[use]}: {fault}")
        return told


class Results(dict[str, Any]):
    """Results of planners and stages, by slot, which are found again by their type."""

    def latest(self, kind: type[T]) -> T | None:
        """The result of the latest slot that gave something of this kind."""
        return next(reversed([*self.each(kind)]), None)

    def each(self, kind: type[T]) -> Iterator[T]:
        """Everything of this kind, in the order of slots."""
        for given in self.values():
            every = given if isinstance(given, tuple) else (given,)
            yield from (one for one in every if isinstance(one, kind))

    def require(self, kind: type[T], why: str) -> T:
        """The latest result of this kind. Raises UsageError, `why` it cannot go on, without one."""
        found = self.latest(kind)
        if found is None:
            raise UsageError(why)
        return found

    def missing(self, owner: Any, method: str) -> Iterator[str]:
        """Names of the types that a method cannot do without, and that nothing has given."""
        for need in needs_of(owner, method):
            if not need.optional and self.latest(need.type) is None:
                yield need.type.__name__

    def call(self, owner: Any, method: str, first: Any) -> Any:
        """Call a method with `first`, and what it asks for by its annotations."""
        found = {need.parameter: self.latest(need.type) for need in needs_of(owner, method)}
        return getattr(owner, method)(first, **found)


def needs_of(owner: Any, method: str) -> tuple[Need, ...]:
    """Parameters that a method of an object needs."""
    kind: type = type(owner)
    return needs(kind, method)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked recipe, where it is to run, and its slots' planners."""

    plan: Plan
    topology: Topology
    planners: Mapping[str, Any]
    """Slot -> the planner of its stage."""
    samples: SampleShape

    @classmethod
    def of(cls, plan: Plan, topology: Topology) -> Job:
        """The job of a recipe. Raises UsageError where no slot tells the length of its samples."""
        planners = Planners.installed().of(plan)
        told = forecasts(plan, topology, planners, Results())[0]
        why = "nothing can be planned: no slot of the recipe tells the length of its samples"
        samples = told.require(SampleShape, why)
        return cls(plan=plan, topology=topology, planners=planners, samples=samples)


def forecasts(
    plan: Plan, topology: Topology, planners: Mapping[str, Any], known: Results
) -> tuple[Results, list[str]]:
    """Ask every slot's planner, and add its answer, by slot, to what is known; and say why the
    other slots tell nothing. Raises what planners raise."""
    told, mute = Results(known), []
    for step in plan.steps:
        planner = planners.get(step.slot)
        if not hasattr(planner, FORECAST):
            mute += [f"slot `{step.slot}` ({step.use}) has no forecast"] if planner is None else []
            continue
        missing = ", ".join(told.missing(planner, FORECAST))
        if missing:
            need = f"slot `{step.slot}` ({step.use}) needs what no slot before it tells: {missing}"
            mute.append(need)
        else:
            told[step.slot] = told.call(planner, FORECAST, topology)
    return told, mute
