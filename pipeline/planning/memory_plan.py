"""The memory plan of a checked recipe on given machines, and the profiles of models on disk."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from pipeline.chain.artifacts import training_slots
from pipeline.chain.plan import Plan
from pipeline.chain.registry import Registry
from pipeline.contracts.model import ModelSource
from pipeline.contracts.optimizer import Precision
from pipeline.contracts.training import TrainedRun
from pipeline.distributed.settings import ProcessCounts
from pipeline.importing.translator import plan_recipe
from pipeline.planning import hardware as machinery
from pipeline.planning.estimate import Estimate, ask_planners, combine
from pipeline.planning.forecast import Profile
from pipeline.planning.hardware import Hardware, HardwareOptions, Margins
from pipeline.planning.planner import Job, Planner, Planners, no_planner
from pipeline.planning.shapes import ModelShape, Topology
from pipeline.planning.step_time import Speed, StepTime, speed, step_time
from pipeline.utils.activities import activity
from pipeline.utils.files import cache_folder, private_folder, replace_text
from pipeline.utils.foreign import read_whole
from pipeline.utils.packages import versions

DECIDE = (ModelSource, Precision, TrainedRun)
"""Types whose stages a profile depends on."""
CODE = ("pipeline", "stages")
"""Packages whose files are part of a profile's key."""
ADAPTER = TypeAdapter(Profile)

_made: dict[str, Profile] = {}


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """A plan of memory and time. short: memory that is too small, `device` or `host` -> the phase
    with the largest peak; memory of unknown size never is. wider: a note on a recipe that computes
    in fp32 on GPUs; else empty. training: the slot that trains, of a recipe that trains several
    times; others: plans of its other trainings, which need less."""

    plan: Plan
    topology: Topology
    hardware: Hardware
    margins: Margins
    estimate: Estimate
    model: ModelShape
    short: Mapping[str, str]
    time: StepTime
    speed: Speed | None
    wider: str = ""
    training: str = ""
    others: tuple[MemoryPlan, ...] = ()

    @property
    def fits(self) -> bool | None:
        """False where anything is short; else None where the device's memory is not known."""
        on_cpu = self.topology.device == "cpu"
        known = self.hardware.host_memory if on_cpu else self.hardware.device_memory
        return False if self.short else None if known is None else True

    @property
    def needed(self) -> int:
        """Bytes of a device at the peak, with margins."""
        return self.margins.of(self.estimate.peak)

    @property
    def left(self) -> int | None:
        """Bytes of a device that are free at the peak, with margins; None: not known."""
        known = None if self.topology.device == "cpu" else self.hardware.device_memory
        return None if known is None else known - self.needed

    @property
    def roomy(self) -> bool:
        """Whether it fits, and leaves the share of a device's memory that advice leaves."""
        least = self.margins.headroom * (self.hardware.device_memory or 0)
        return not self.short and (self.left is None or self.left >= least)

    @property
    def idle(self) -> int:
        """Ranks without a sample in any step."""
        data = self.topology.data_ranks
        return max(data - self.estimate.step.samples, 0) * (self.topology.ranks // data)

    def record(self) -> dict[str, Any]:
        """The plan as JSON, in bytes and seconds."""
        from pipeline.execution.saved_plan import VERSION, identity

        ends = {name: getattr(self.time, name) for name in ("least", "expected", "bound")}
        return {
            "schema_version": VERSION,
            "name": self.plan.recipe.name,
            "identity": identity(self.plan, self.topology.local_ranks).model_dump(),
            "ranks": self.topology.ranks,
            "data_ranks": self.topology.data_ranks,
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
            "training": self.training or None,
            "others": [
                {
                    "training": one.training, "device_bytes": one.needed,
                    "host_bytes": one.estimate.host_peak, "speed": one.speed and asdict(one.speed),
                }
                for one in self.others
            ],
        }  # fmt: skip


def check(
    recipe: Path,
    overrides: Sequence[str],
    machines: HardwareOptions,
    registry: Registry | None = None,
) -> Plan:
    """Check a recipe for the machines of the options. Raises RecipeError."""
    # Options replace the recipe's device; one in the overrides contradicts them.
    lines = [*(["launch.device=cuda"] if machines.on_gpus else []), *overrides]
    started = ProcessCounts(procs=machines.procs)
    return plan_recipe(recipe, lines, registry=registry, forecast=True, started=started)


def estimate_plan(plan: Plan, machines: HardwareOptions, margins: Margins) -> MemoryPlan:
    """Estimate a checked recipe. Of several trainings, it is the plan of the one that needs most:
    they follow each other. One without a planner is not counted. Raises PipeError."""
    known, slots = Planners.installed(), training_slots(plan.view.wiring)
    trains = [one for one in plan.slots if one.slot in slots]
    told = [one.slot for one in trains if one.use in known]
    if len(told) < 2:
        return _estimated(plan, machines, margins)
    found = [
        replace(_estimated(plan.of_training(slot), machines, margins), plan=plan, training=slot)
        for slot in told
    ]

    on_cpu = plan.view.device == "cpu"
    needs = [(bool(o.short), 0 if on_cpu else o.needed, o.estimate.host_peak) for o in found]
    most = found[needs.index(max(needs))]
    caveats = [*most.estimate.caveats, *(no_planner(one) for one in trains if one.slot not in told)]
    estimate = replace(most.estimate, caveats=caveats)
    return replace(most, estimate=estimate, others=tuple(one for one in found if one is not most))


def _estimated(plan: Plan, machines: HardwareOptions, margins: Margins) -> MemoryPlan:
    per_node = plan.recipe.launch.procs if plan.recipe.launch.nodes else None
    site = machinery.resolve_topology(machines, plan.view.procs, plan.view.device, per_node)
    job = Job.of(plan, site)
    topology, profile = job.topology, profile_of(job)
    results = ask_planners(job, profile)
    estimate, policy = combine(topology, results), results.latest(Precision)
    compute = policy.compute if policy else "fp32"
    hardware = machinery.resolve_hardware(machines, topology, compute=compute)
    time, wider = step_time(estimate, topology, hardware), ""
    if topology.device != "cpu" and compute == "fp32":
        slots = (one.slot for one in plan.giving(Precision))
        usual = f"{next(slots, 'precision')}.compute={machinery.narrow_dtype(machines)}"
        wider = f"computes in fp32, as the recipe says; {usual} is usual on GPUs"
    return MemoryPlan(
        plan=plan, topology=topology, hardware=hardware, margins=margins, estimate=estimate,
        model=profile.model, short=shortages(estimate, topology, hardware, margins), time=time,
        speed=speed(time, estimate, topology, hardware), wider=wider,
    )  # fmt: skip


def shortages(
    estimate: Estimate, topology: Topology, hardware: Hardware, margins: Margins
) -> dict[str, str]:
    places = {"host": (estimate.host, estimate.host_peak, hardware.host_memory)}
    if topology.device != "cpu":
        needed = margins.of(estimate.peak)
        places = {"device": (estimate.device, needed, hardware.device_memory)} | places
    return {
        place: max(phases, key=lambda phase: phases[phase].bytes)
        for place, (phases, needed, there) in places.items()
        if there is not None and needed > there
    }


def profile_of(job: Job) -> Profile:
    """The profile of a job's model: of this process, from disk, or a new one. Raises StageError."""
    content = {
        "versions": versions(),
        "code": _code(),
        "samples": asdict(job.samples),
        "device": job.topology.device,
        "division": job.division and job.division.key,
        "stages": [
            [planned.use, (job.planners.get(planned.slot) or Planner(planned.stage)).depends()]
            for planned in job.plan.slots
            if issubclass(planned.gives or object, DECIDE)
        ],
    }
    text = json.dumps(content, sort_keys=True, default=str)
    key, given = hashlib.sha256(text.encode()).hexdigest(), os.environ.get("PIPE_PROFILES")
    file = (Path(given) if given else cache_folder() / "profiles") / f"{key}.json"
    if key not in _made:
        try:
            _made[key] = ADAPTER.validate_json(read_whole(file))
        except (OSError, ValueError):  # missing, or damaged
            from pipeline.planning.trace.profiling import profile

            with activity("running the model's layers without memory"):
                _made[key] = profile(job)
            with contextlib.suppress(OSError):  # a folder that cannot be written
                file.parent.parent.mkdir(parents=True, exist_ok=True)
                private_folder(file.parent)
                replace_text(file, ADAPTER.dump_json(_made[key]).decode() + "\n")
    return _made[key]


@functools.cache
def _code() -> Sequence[Any]:
    """Name, size and time of each of the project's files: a change of any may change profiles."""
    home = Path(__file__).parents[2]
    files = [path for package in CODE for path in sorted((home / package).rglob("*.py"))]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
