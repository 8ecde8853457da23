"""A recipe, machines, and what comes of them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.contracts.precision import Precision
from pipeline.plan.plan import Plan, plan_file
from pipeline.plan.registry import Registry
from pipeline.planning.estimate import Estimate, ask, assemble
from pipeline.planning.hardware import Asked, Hardware, Margins, hardware_of, site_of
from pipeline.planning.planner import Job, Topology
from pipeline.planning.profile import profile_of
from pipeline.planning.shapes import ModelShape
from pipeline.planning.step_time import Speed, StepTime, speed, step_time
from pipeline.run.saved_plan import VERSION, identity


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """A plan of memory and time."""

    plan: Plan
    topology: Topology
    hardware: Hardware
    margins: Margins
    estimate: Estimate
    model: ModelShape
    short: Mapping[str, str]
    """Memory of which there is too little, `device` or `host` -> the phase that needs the most."""
    time: StepTime
    speed: Speed | None
    profiled: int | None = None
    """Where it was traced: bytes of the device at the peak, as the model's profile says."""

    @property
    def fits(self) -> bool | None:
        """False where anything is short; else None where the device's memory is not known."""
        on_cpu = self.topology.device == "cpu"
        known = self.hardware.host_memory if on_cpu else self.hardware.device_memory
        return False if self.short else None if known is None else True

    @property
    def idle(self) -> int:
        """Ranks without a sample in any step."""
        return max(self.topology.ranks - self.estimate.step.samples, 0)

    def record(self) -> dict[str, Any]:
        """JSON. Bytes and seconds."""
        ends = {name: getattr(self.time, name) for name in ("least", "expected", "bound")}
        return {
            "schema_version": VERSION,
            "name": self.plan.recipe.name,
            "identity": identity(self.plan, self.topology.local_ranks).model_dump(),
            "level": "profile" if self.profiled is None else "trace",
            "ranks": self.topology.ranks,
            "idle_ranks": self.idle,
            "nodes": self.topology.nodes,
            "computes_on": self.topology.device,
            "hardware": asdict(self.hardware),
            "margins": asdict(self.margins),
            **asdict(self.estimate),
            "seconds": asdict(self.time) | ends,
            "speed": self.speed and asdict(self.speed),
            "warnings": [*map(str, self.plan.warnings)],
            "fits": self.fits,
            "short": self.short,
        }


def check(
    recipe: Path, overrides: Sequence[str], asked: Asked, registry: Registry | None = None
) -> Plan:
    """The recipe, checked for what is asked for. Raises RecipeError."""
    # The recipe's device gives way to options; one that is said beside them contradicts them.
    lines = [*(["launch.device=cuda"] if asked.on_gpus else []), *overrides]
    return plan_file(recipe, lines, registry=registry, forecast=True, procs=asked.procs)


def draw_up(plan: Plan, asked: Asked, margins: Margins, *, trace: bool = False) -> MemoryPlan:
    """The plan of a recipe that has been checked, or its trace too. Raises UsageError and
    StageError."""
    topology = site_of(asked, plan.view.procs, plan.view.device)
    job = Job.of(plan, topology)
    profile = profile_of(job)
    told = ask(job, profile)
    estimate, profiled = assemble(topology, told), None
    if trace:
        from pipeline.planning.trace.run import run

        profiled = estimate.peak
        estimate = assemble(topology, told, traced=run(job).peaks)
    policy = told.latest(Precision)
    hardware = hardware_of(asked, topology, compute=policy.compute if policy else "fp32")
    time = step_time(estimate, topology, hardware)
    return MemoryPlan(
        plan=plan,
        topology=topology,
        hardware=hardware,
        margins=margins,
        estimate=estimate,
        model=profile.model,
        short=shortages(estimate, topology, hardware, margins),
        time=time,
        speed=speed(time, estimate, topology, hardware),
        profiled=profiled,
    )


def shortages(
    estimate: Estimate, topology: Topology, hardware: Hardware, margins: Margins
) -> dict[str, str]:
    """Find the memory that is short, as `MemoryPlan.short`; none where it is not known."""
    places = {"host": (estimate.host, estimate.host_peak, hardware.host_memory)}
    if topology.device != "cpu":
        needed = margins.of(estimate.peak)
        places = {"device": (estimate.device, needed, hardware.device_memory)} | places
    return {
        place: max(phases, key=lambda phase: phases[phase].bytes)
        for place, (phases, needed, there) in places.items()
        if there is not None and needed > there
    }


def estimated(plan: Plan, topology: Topology) -> Estimate:
    """Needs of a checked recipe at a place. Raises UsageError and StageError."""
    job = Job.of(plan, topology)
    return assemble(topology, ask(job, profile_of(job)))
