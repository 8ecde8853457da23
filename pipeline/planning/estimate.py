"""Put together what a recipe will need at a place from what its slots' planners tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.accelerators import GIB
from pipeline.length import Length
from pipeline.planning.memory import step_peaks
from pipeline.planning.planner import Job, Results, Topology, forecasts
from pipeline.planning.profile import Profile
from pipeline.planning.shapes import ModelShape
from pipeline.planning.strategy import LOAD, Copies, Held, StrategyMemory, Traffic

PROCESSES = "processes"
PROCESS = round(0.6 * GIB)
"""Bytes of host memory of a process that has loaded the libraries, measured on CPUs."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """An optimizer step, as the stage that trains cuts it: micro-batches of each rank, samples of
    one and of the rank that has most, samples and tokens, padding counted, over all ranks, and the
    length of the training."""

    microbatches: int
    micro_batch: int
    of_rank: int
    samples: int
    tokens: int
    length: Length = field(default_factory=Length)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Floating-point operations of one rank in an optimizer step: products of matrices, attention
    between tokens that see each other, and both done a second time. `moved` are bytes to and from
    its memory beside products: each tensor that is made, both ways, and what is updated."""

    products: float
    attention: float
    again: float
    moved: float


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Files that a stage writes."""

    what: str
    bytes: int
    formula: str


@dataclass(frozen=True, kw_only=True)
class HostNeed(Storage):
    """Host memory of one node that a stage takes in a phase, beyond the step's; in all of them from
    when the model is loaded, where `phase` is empty."""

    phase: str


@dataclass(frozen=True, kw_only=True)
class Extras:
    """Needs of a stage beside the step, as of one that saves or exports: files, those of which a
    longer training leaves more, host memory. `caveats` tell what this leaves out of account."""

    storage: Sequence[Storage] = ()
    saved: Callable[[Length], Storage] | None = None
    host: Sequence[HostNeed] = ()
    caveats: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Needs of one recipe at one place, in bytes: by phase, what the fullest rank's device and the
    fullest node's memory hold at their peaks, files' cache not counted; by item, state that is
    offloaded to a node's disk, and how items come about."""

    device: Mapping[str, Held]
    host: Mapping[str, Held]
    offloaded: Mapping[str, int]
    storage: Sequence[Storage]
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
    known = Results(profile=profile, model=profile.model)
    told, mute = forecasts(job.plan, job.topology, job.planners, known)
    told["mute"] = Extras(caveats=mute)
    return told


def assemble(
    topology: Topology, told: Results, *, traced: Mapping[str, Held] | None = None
) -> Estimate:
    """Put together what planners have told; `traced` stands for the device's memory. Raises
    UsageError where nobody tells of a strategy or of a step."""
    extras, model = [*told.each(Extras)], told.require(ModelShape, "the model has no shape")
    caveats = (*model.caveats, *(caveat for extra in extras for caveat in extra.caveats))
    why = "; ".join(["this recipe cannot be planned: {}", *caveats])
    profile: Profile = told.require(Profile, "the model has no profile")
    step = told.require(Step, why.format("no slot tells how it trains"))
    strategy: StrategyMemory = told.require(StrategyMemory, why.format("no slot wraps the model"))
    peaks = step_peaks(profile, strategy, samples=step.micro_batch, microbatches=step.microbatches)
    needs = [need for extra in extras for need in extra.host]
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
        storage=[
            *(extra.saved(step.length) for extra in extras if extra.saved),
            *(file for extra in extras for file in extra.storage),
        ],
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


def _host(
    topology: Topology, held: Mapping[str, Held], needs: Sequence[HostNeed]
) -> dict[str, Held]:
    ranks = topology.on_node
    base = {PROCESSES: PROCESS * ranks}
    phases = {
        phase: Counter(base | {item: size * ranks for item, size in one.items.items()})
        for phase, one in held.items()
    }
    for need in needs:
        for phase in [need.phase] if need.phase else [one for one in held if one != LOAD]:
            phases.setdefault(phase, Counter(base))[need.what] += need.bytes
    return {phase: Held.of(items) for phase, items in phases.items()}
