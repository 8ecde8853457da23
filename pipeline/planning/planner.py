"""Planners: classes that answer for a stage when a recipe is planned or benchmarked.

A planner has an entry point in the group `pipe.planners`, under the stage's name; a stage that
needs nothing worth counting says so instead, with a class attribute `nothing_to_plan = True`. A
planner derives from `Planner`, and may have two more methods, whose further parameters are
annotated, as in `run`, with the types that they need from earlier slots:

- `forecast(self, topology, ...)` returns the stage's needs (`pipeline.planning.forecast`);
- `trace(self, ctx, ...)` stands for the stage's `run` where the model is profiled on tensors
  without values: a stage that returns the model does, one that trains calls `TraceScope.run`.

Importing a planner imports no torch. The presets of stages that wrap are strategies, for commands
that compare them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pipeline.chain.artifacts import Results
from pipeline.chain.registry import Plugins, Registry
from pipeline.contracts.data import Data
from pipeline.contracts.engine import Engine
from pipeline.contracts.signature import gives
from pipeline.errors import PluginError, UsageError
from pipeline.planning.shapes import Division, SampleShape, Step, Topology
from pipeline.utils.text import did_you_mean

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan, PlannedSlot
    from pipeline.contracts.data import MicroBatch
    from pipeline.contracts.objective import Objective

S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class TraceScope:
    """Part of a training to profile: the first `blocks` blocks of the model (None: all), and one
    micro-batch of `samples` samples. `run` runs the micro-batch forward and backward under an
    objective. `once(key, f)` runs f for the first call with a key; later calls in the same part of
    the model return its result, and count what it took again: for many equal parts."""

    blocks: int | None = None
    samples: int = 1
    run: Callable[[MicroBatch, Objective], None] = lambda batch, objective: None
    once: Callable[[Any, Callable[[], Any]], Any] = lambda key, function: function()


@dataclass(frozen=True)
class Saving:
    """A change of a stage's own fields with which a step needs less memory. order: position among
    the savings of all stages, which are tried in order; one for each kind. `beside`: fields of
    other slots to change with it, by the type that the slot returns."""

    order: int
    what: str
    fields: Mapping[str, Any]
    beside: Mapping[type, Mapping[str, Any]] = dataclasses.field(default_factory=dict)


CHUNK, SMALLER, REDUCE, RECOMPUTE, AWAY = 1, 2, 3, 4, 5
"""Orders of savings that only cost time: logits in chunks, smaller micro-batches, gradients reduced
more often, activations computed again, and their inputs in host memory, which costs the most."""
NARROW_MOMENTS, NARROW_MASTERS, NARROW_FROZEN = 6, 7, 8
"""Orders of savings that change numerics: moments, master weights, frozen weights in fewer bits."""


class Tier:
    """Positions in the order in which strategies are tried: faster ones, which need more memory,
    first. SHARDED_WITHIN_NODES: replicated across nodes. PARTLY_SHARDED: gathered once a step.
    DIVIDED: ranks share samples or layers; tried where no earlier one fits, leaves no rank without
    a sample, and computes for as long as it communicates. From OFFLOADED on, each is tried only if
    no earlier one fits."""

    REPLICATED = 10
    SHARDED_WITHIN_NODES = 20
    PARTLY_SHARDED = 30
    SHARDED = 40
    DIVIDED = 45
    OFFLOADED = 50
    MORE_OFFLOADED = 55
    OFFLOADED_TO_DISK = 60


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A way to use a stage that wraps. fields: of the slot. what: short description. order: `Tier`
    in which `pipe advise` tries it; 0: never. at_first: further fields that it begins with, which
    spend memory to save time; the planner's `savings` take them back. axes: ranks by the axis on
    which they share samples or layers: `tensor`, within a node, and others. Of presets with the
    same axes, `pipe advise` takes the first that fits."""

    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    what: str = ""
    order: int = 0
    at_first: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)


Presets = Mapping[str, Preset]
"""Presets by name."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A few optimizer steps of a recipe, to be measured: no evaluation, and one checkpoint, at the
    end. profile: steps that torch.profiler records. growth: samples of one optimizer step, in
    multiples of the recipe's. shares: number of data-parallel ranks for defaults that depend on it,
    so that all compared trials have the same micro-batch."""

    steps: int
    profile: tuple[int, ...] = ()
    growth: Fraction = Fraction(1)
    shares: int = 1

    def grown(self, samples: int) -> int:
        """Samples of a step of the trial, from the recipe's. Raises UsageError for a fraction."""
        grown = samples * self.growth
        if grown.denominator != 1:
            why = f"{samples} samples a step x {self.growth} would be {float(grown):g}"
            hint = "--weak needs a global batch that divides evenly"
            raise UsageError(f"samples per process cannot stay: {why}", hint=hint)
        return int(grown)


class Planner(Generic[S]):
    """Forecasts of a checked stage. The base class stands for one that needs nothing."""

    def __init__(self, stage: S) -> None:
        self.stage = stage

    def depends(self) -> Mapping[str, Any]:
        """Settings of the stage on which a profile of the model depends; by default, all."""
        stage: Any = self.stage
        return dataclasses.asdict(stage)

    def savings(self, ranks: int) -> Iterable[Saving]:
        """Changes with which a step on `ranks` data-parallel ranks needs less memory."""
        return ()

    def for_benchmark(self, trial: Trial) -> S:
        """The stage with the settings of a trial: one that trains, which needs this method to be
        measured, takes `trial.steps` steps and evaluates nothing; one that saves does so once and
        into the run's folder."""
        return self.stage

    @classmethod
    def presets(cls) -> Presets:
        """Strategies of a stage that wraps a model, by name."""
        return {}

    def division(self, topology: Topology) -> Division | None:
        """How a wrap stage divides the model; None if each rank computes all of it."""
        return None


class Planners(Plugins[type[Planner[Any]]]):
    """Planner classes by stage."""

    group = "pipe.planners"
    noun = "planner of stage"
    base = Planner

    def find(self, use: str) -> type[Planner[Any]] | None:
        """The planner's class of a stage; None without one. Raises PluginError."""
        return self.load(use) if use in self else None

    def of(self, plan: Plan) -> dict[str, Any]:
        """Slot -> the planner of its stage, for slots whose stages have one, or need none."""
        found = {}
        for one in plan.slots:
            kind = self.find(one.use)
            if kind is not None or getattr(one.stage, "nothing_to_plan", False):
                found[one.slot] = (kind or Planner)(one.stage)
        return found


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked recipe on a topology, with its slots' planners, and the forecasts that need no
    profile of the model: its samples, and the micro-batches of a step."""

    plan: Plan
    topology: Topology
    planners: Mapping[str, Any]
    samples: SampleShape
    step: Step | None
    division: Division | None = None

    @classmethod
    def of(cls, plan: Plan, topology: Topology) -> Job:
        """Raises UsageError if nothing forecasts its samples, or it trains without a planner."""
        planners = Planners.installed().of(plan)
        silent = {one.slot: no_planner(one) for one in plan.slots if one.slot not in planners}
        require_told(plan, silent)
        train, division = planned(plan), None
        if train is not None:
            topology = dataclasses.replace(topology, shares=plan.view.data_ranks(train.stage))
            wrap = plan.wrap_of(train)
            division = None if wrap is None else planners[wrap.slot].division(topology)
        if division is not None:
            topology = dataclasses.replace(topology, stages=division.stages)
        results, _ = forecasts(plan, topology, planners, Results())
        why = "; ".join(silent[one.slot] for one in plan.giving(Data) if one.slot in silent)
        lacks = f"the length of samples: {why or 'the recipe has no data slot'}"
        return cls(
            plan=plan, topology=topology, planners=planners, division=division,
            samples=results.require(SampleShape, f"nothing can be planned without {lacks}"),
            step=results.latest(Step),
        )  # fmt: skip


def planned(plan: Plan, silent: Collection[str] = ()) -> PlannedSlot | None:
    """The training that is planned: the last with a planner and not silent, or else the last."""
    known = Planners.installed()
    told = [one for one in plan.trainings if one.use in known and one.slot not in silent]
    return next(reversed(told or plan.trainings), None)


def require_told(plan: Plan, silent: Mapping[str, str]) -> None:
    """Raise UsageError if the training that is planned, or the slot that wraps its model, is one of
    the silent slots (slot -> a sentence that says why)."""
    train = planned(plan, silent)
    needed = () if train is None else (plan.wrap_of(train), train)
    why = dict.fromkeys(silent[one.slot] for one in needed if one and one.slot in silent)
    if why:
        raise UsageError(f"this recipe cannot be planned: {'; '.join(why)}")


def forecasts(
    plan: Plan, topology: Topology, planners: Mapping[str, Any], known: Results
) -> tuple[Results, dict[str, str]]:
    """The results `known` and each planner's forecast by slot; and a sentence for each slot without
    a forecast, which names what it lacks. Raises the planners' errors."""
    results, mute = Results(known), dict[str, str]()
    for one in plan.slots:
        planner = planners.get(one.slot)
        if planner is None:
            mute[one.slot] = no_planner(one)
        elif hasattr(planner, "forecast"):
            missing = ", ".join(results.missing(planner, "forecast"))
            silent = " and ".join(mute[slot] for slot in mute if slot in one.inputs.values())
            if not missing:
                results[one.slot] = results.call(planner, "forecast", topology)
            elif silent:
                mute[one.slot] = f"{silent}, and slot `{one.slot}` needs it ({missing})"
            else:
                why = f"needs forecasts that no earlier slot provides: {missing}"
                mute[one.slot] = f"slot `{one.slot}` ({one.use}) {why}"
    return results, mute


def no_planner(planned: PlannedSlot) -> str:
    return f"slot `{planned.slot}` ({planned.use}) has no planner"


@dataclass(frozen=True, kw_only=True)
class Strategy(Preset):
    """A preset under its name, with the stage that offers it."""

    name: str
    use: str

    @property
    def slot(self) -> dict[str, Any]:
        return {"use": self.use, **self.fields}

    @property
    def generous(self) -> dict[str, Any]:
        """The slot with the fields that spend memory to save time."""
        return {**self.slot, **self.at_first}

    def __str__(self) -> str:
        return f"{self.name} ({self.what})"


def presets(planners: Planners, use: str) -> Mapping[str, Preset]:
    """Presets of a stage's planner by name. Raises PluginError, naming the planner, if it cannot
    give them or one of them is not a Preset."""
    kind = planners.find(use) or Planner
    try:
        found = dict(kind.presets())
        wrong = [name for name, preset in found.items() if not isinstance(preset, Preset)]
        fault = f"`{wrong[0]}` is not a Preset" if wrong else ""
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    if fault:
        raise PluginError(f"{kind.__module__}.{kind.__qualname__}.presets: {fault}")
    return found


def strategies(registry: Registry) -> dict[str, Strategy]:
    """Strategies of all installed stages that give an Engine, by name. Stages that cannot be loaded
    are passed over. Raises PluginError for presets with faults, or for a name offered twice."""
    planners, found = Planners.installed(), dict[str, Strategy]()
    for use in registry.names():
        try:
            entry, kind = registry.entry(use), registry.load(use)
        except PluginError:
            continue
        if not issubclass(gives(kind) or object, Engine):
            continue
        known = {field.name for field in dataclasses.fields(kind)}
        for name, preset in presets(planners, use).items():
            if not {*preset.fields, *preset.at_first} <= known:
                what = f"its preset `{name}` has fields that it has not"
                raise PluginError(f"stage `{use}` of {entry}: {what}")
            if name in found:
                other = found[name].use
                hint = f"uninstall one of {registry.entry(other)} and {entry}"
                why = f"is offered by {other} and by {use}"
                raise PluginError(f"strategy `{name}` {why}", hint=hint)
            found[name] = Strategy(name=name, use=use, **vars(preset))
    return found


def chosen(names: list[str], registry: Registry) -> list[Strategy]:
    """The strategies of these names. Raises UsageError for an unknown one."""
    known = strategies(registry)
    for name in names:
        if name not in known:
            raise UsageError(f"there is no strategy `{name}`", hint=did_you_mean(name, known))
    return [known[name] for name in names]


def in_order(registry: Registry) -> list[Strategy]:
    """The strategies that `pipe advise` tries, in its order."""
    found = (strategy for strategy in strategies(registry).values() if strategy.order)
    return sorted(found, key=lambda one: (one.order, math.prod(one.axes.values()), one.name))
