"""Put together what a recipe will need at a place from what its slots' planners tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.accelerators import GIB
from pipeline.binding import Results
from pipeline.planning.memory import step_peaks
from pipeline.planning.planner import Job, Topology, forecasts
from pipeline.planning.profile import Profile
from pipeline.planning.shapes import ModelShape, Step
from pipeline.planning.strategy import LOAD, Copies, Held, StrategyMemory, Traffic

PROCESSES = "processes"
PROCESS = round(0.6 * GIB)
"""Bytes of host memory of a process that has loaded the libraries, measured on CPUs."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Floating-point operations of one rank in an optimizer step: products of matrices, attention
    between tokens that see each other, and both done a second time. `moved` are bytes to and from
    its memory beside products: each tensor that is made, both ways, and what is updated."""

    products: float
    attention: float
    again: float
    moved: float


@dataclass(frozen=True)
class Need:
    """Bytes that a stage needs beside the step: files, or, with a phase, memory of one host, in all
    phases from when the model is loaded where it is empty."""

    what: str
    bytes: int
    formula: str
    phase: str | None = None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Needs of one recipe at one place, in bytes: by phase, what the fullest rank's device and the
    fullest node's memory hold at their peaks, files' cache not counted; by item, state that is
    offloaded to a node's disk, and how items come about."""

    device: Mapping[str, Held]
    host: Mapping[str, Held]
    offloaded: Mapping[str, int]
    storage: Sequence[Need]
    formulas: Mapping[str, str]
    traffic: Sequence[Traffic]
    copies: Copies
    step: Step
    work: Work
    caveats: Sequence[str] = ()

    @property
    def peak(self) -> int:
        """Bytes of the device's memory over all phases."""
        return max((held.bytes for held in self.device.values()), default=0)

    @property
    def host_peak(self) -> int:
        """Bytes of the host's memory over all phases."""
        return max((held.bytes for held in self.host.values()), default=0)


def ask(job: Job, profile: Profile) -> Results:
    """The model, what every slot's planner tells, and which slots tell nothing. Raises what
    planners raise."""
    known = Results({**job.told, "profile": profile, "model": profile.model})
    return forecasts(job.plan, job.topology, job.planners, known)


def assemble(
    topology: Topology, told: Results, *, traced: Mapping[str, Held] | None = None
) -> Estimate:
    """Put together what planners have told; `traced` stands for the device's memory. Raises
    UsageError where nobody tells of a strategy or of a step."""
    model = told.require(ModelShape, "the model has no shape")
    caveats, needs = (*model.caveats, *told.each(str)), [*told.each(Need)]
    why = "; ".join(["this recipe cannot be planned: {}", *caveats])
    profile: Profile = told.require(Profile, "the model has no profile")
    step = told.require(Step, why.format("no slot tells how it trains"))
    strategy: StrategyMemory = told.require(StrategyMemory, why.format("no slot wraps the model"))
    peaks = step_peaks(profile, strategy, samples=step.micro_batch, microbatches=step.microbatches)
    device = traced or peaks.of("device")
    on_cpu = topology.device == "cpu"
    host = device if traced and on_cpu else peaks.of("host", both=on_cpu)
    disk = {item: size for one in peaks.of("disk").values() for item, size in one.items.items()}
    line = profile.total("offloaded", "forward")
    waiting = round(line.fixed * step.microbatches + line.each * step.of_rank)
    copies = strategy.copies(step.microbatches)
    return Estimate(
        device=device,
        host=_host(topology, host, needs),
        offloaded={item: size * topology.on_node for item, size in disk.items()},
        storage=[need for need in needs if need.phase is None],
        formulas={
            **peaks.formulas,
            **{need.what: need.formula for need in needs},
            PROCESSES: f"{PROCESS / GIB:.1f} GiB a process, as measured on CPUs",
        },
        traffic=[*strategy.traffic(step.microbatches)],
        copies=replace(copies, up=copies.up + waiting, down=copies.down + waiting),
        step=step,
        work=_work(profile, strategy, step),
        caveats=caveats,
    )


def _work(profile: Profile, strategy: StrategyMemory, step: Step) -> Work:
    def total(field: str) -> float:
        line = profile.total(field)
        return line.fixed * step.microbatches + line.each * step.of_rank

    names = "products", "attention", "again"
    moved = 2 * total("made") + strategy.updated
    return Work(moved=moved, **{name: total(name) for name in names})


def _host(topology: Topology, held: Mapping[str, Held], needs: Sequence[Need]) -> dict[str, Held]:
    ranks = topology.on_node
    base = {PROCESSES: PROCESS * ranks}
    phases = {
        phase: Counter(base | {item: size * ranks for item, size in one.items.items()})
        for phase, one in held.items()
    }
    later = [phase for phase in held if phase != LOAD]
    for need in needs:
        for phase in later if need.phase == "" else filter(None, [need.phase]):
            phases.setdefault(phase, Counter(base))[need.what] += need.bytes
    return {phase: Held.of(items) for phase, items in phases.items()}
