"""A recipe, machines, and what comes of them together."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.artifacts import Precision
from pipeline.plan import Plan, plan_file
from pipeline.planning import report
from pipeline.planning.estimate import Estimate, ask, assemble
from pipeline.planning.hardware import Asked, Hardware, hardware_of, site_of
from pipeline.planning.margins import Margins, Shortage, shortages
from pipeline.planning.planner import Job, Results, Topology
from pipeline.planning.profile import profile_of
from pipeline.planning.shapes import ModelShape
from pipeline.planning.step_time import Speed, StepTime, speed, step_time
from pipeline.planning.strategy import StrategyMemory
from pipeline.registry import Registry
from pipeline.saved_plan import VERSION, identity

if TYPE_CHECKING:
    from pipeline.planning.trace.traced import Trace


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """A plan of memory and time."""

    plan: Plan
    topology: Topology
    hardware: Hardware
    margins: Margins
    estimate: Estimate
    model: ModelShape
    trace: Trace | None = None
    """Where device memory was traced."""
    profiled: Estimate | None = None
    """Beside a trace: what the model's profile says."""

    @functools.cached_property
    def short(self) -> Sequence[Shortage]:
        """Everything that does not fit."""
        return list(shortages(self.estimate, self.topology, self.hardware, self.margins))

    @property
    def fits(self) -> bool | None:
        """False where anything is short; else None where the device's memory is not known."""
        if self.short:
            return False
        on_cpu = self.topology.device == "cpu"
        known = self.hardware.host_memory if on_cpu else self.hardware.device_memory
        return None if known is None else True

    @property
    def idle(self) -> int:
        """Ranks without a sample in any step."""
        step = self.estimate.step
        return max(self.topology.ranks - step.samples, 0)

    @functools.cached_property
    def time(self) -> StepTime:
        """Time of a step."""
        return step_time(self.estimate, self.topology, self.hardware)

    @property
    def speed(self) -> Speed | None:
        """Speed of the training; None where the hardware's rates are not known."""
        return speed(self.time, self.estimate, self.topology, self.hardware)

    def lines(self, *, explain: bool) -> Iterator[str]:
        """For people."""
        yield report.verdict(self)
        yield from self._head()
        yield ""
        yield from report.lines(self)
        if self.trace is not None and self.profiled is not None:
            yield from report.comparison(self.trace.how, self.estimate, self.profiled)
        if explain:
            yield ""
            yield from report.explanations(self.estimate)

    def _head(self) -> Iterator[str]:
        topology, step = self.topology, self.estimate.step
        device = "CPU process" if topology.device == "cpu" else self.hardware.kind or "GPU"
        nodes = f"{topology.nodes} node{'s' * (topology.nodes > 1)}"
        yield f"{self.plan.recipe.name} on {nodes}, {topology.ranks} x {device}"
        written = self.plan.recipe.launch.procs
        if written is not None and written != topology.ranks:
            yield f"the recipe says {written} processes; planned for {topology.ranks}, as asked"
        parameters, trained = self.model.parameters, self.model.trained
        yield f"{parameters / 1e9:.3g} G parameters, {trained / 1e9:.3g} G of them trained"
        yield (
            f"{step.samples} samples of {step.tokens // step.samples} tokens a step: "
            f"{step.microbatches} micro-batch{'es' * (step.microbatches > 1)} on each rank"
        )
        if self.idle:
            yield (
                f"{self.idle} of {topology.ranks} ranks idle: there is no sample for them in a step"
            )

    def record(self) -> dict[str, Any]:
        """JSON. Bytes and seconds."""
        time = self.time
        return {
            "schema_version": VERSION,
            "name": self.plan.recipe.name,
            "identity": identity(self.plan, self.topology.local_ranks).model_dump(),
            "level": "profile" if self.trace is None else "trace",
            "traced": None if self.trace is None else self.trace.how,
            "ranks": self.topology.ranks,
            "idle_ranks": self.idle,
            "nodes": self.topology.nodes,
            "computes_on": self.topology.device,
            "hardware": asdict(self.hardware),
            "margins": asdict(self.margins),
            "device": {phase: asdict(peak) for phase, peak in self.estimate.device.items()},
            "host": {phase: asdict(peak) for phase, peak in self.estimate.host.items()},
            "offloaded": dict(self.estimate.disk),
            "storage": [asdict(file) for file in self.estimate.storage],
            "traffic": [asdict(traffic) for traffic in self.estimate.traffic],
            "copies": asdict(self.estimate.copies),
            "step": asdict(self.estimate.step),
            "work": asdict(self.estimate.work),
            "seconds": asdict(time)
            | {"least": time.least, "expected": time.expected, "bound": time.bound},
            "speed": None if self.speed is None else asdict(self.speed),
            "formulas": dict(self.estimate.formulas),
            "caveats": [*self.estimate.caveats, *self.hardware.caveats],
            "fits": self.fits,
            "short": [asdict(short) for short in self.short],
        }


def draw_up(
    recipe: Path,
    overrides: Sequence[str],
    asked: Asked,
    margins: Margins,
    registry: Registry | None = None,
    *,
    trace: bool = False,
) -> MemoryPlan:
    """Check the recipe, and plan it, or trace it too. Raises RecipeError, UsageError and
    StageError."""
    return draw_up_plan(check(recipe, overrides, asked, registry), asked, margins, trace=trace)


def check(
    recipe: Path, overrides: Sequence[str], asked: Asked, registry: Registry | None = None
) -> Plan:
    """The recipe, checked for what is asked for. Raises RecipeError."""
    # The recipe's device gives way to options; one that is said beside them contradicts them.
    lines = [*asked.overrides, *overrides]
    return plan_file(recipe, lines, registry=registry, forecast=True, procs=asked.procs)


def draw_up_plan(plan: Plan, asked: Asked, margins: Margins, *, trace: bool = False) -> MemoryPlan:
    """The plan of a recipe that has been checked."""
    topology = site_of(asked, plan.view.procs, plan.view.device)
    job = Job.of(plan, topology)
    told = ask(job, profile_of(job))
    profiled = assemble(topology, told)
    policy = told.latest(Precision)
    found = _traced(job, told) if trace else None
    return MemoryPlan(
        plan=plan,
        topology=topology,
        hardware=hardware_of(asked, topology, compute=policy.compute if policy else "fp32"),
        margins=margins,
        estimate=assemble(topology, told, traced=found.peaks) if found else profiled,
        model=told.require(ModelShape, "no slot of the recipe gives a model"),
        trace=found,
        profiled=profiled if found else None,
    )


def estimated(plan: Plan, topology: Topology) -> Estimate:
    """Needs of a checked recipe at a place. Raises UsageError and StageError."""
    job = Job.of(plan, topology)
    return assemble(topology, ask(job, profile_of(job)))


def _traced(job: Job, told: Results) -> Trace:
    from pipeline.planning.trace.traced import trace

    strategy: StrategyMemory = told.require(StrategyMemory, "no slot of the recipe wraps the model")
    return trace(job, strategy)
