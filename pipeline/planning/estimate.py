"""Put together what a recipe will need at a place from what its slots' planners tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.accelerators import GIB
from pipeline.length import Length
from pipeline.planning.memory import step_peaks
from pipeline.planning.planner import Job, Results, Topology, forecasts
from pipeline.planning.profile import Profile
from pipeline.planning.shapes import ModelShape, SampleShape
from pipeline.planning.strategy import LOAD, Copies, Held, StrategyMemory, Traffic

PROCESSES = "processes"
PROCESS = round(0.6 * GIB)
"""Bytes of host memory of a process that has loaded the libraries, measured on CPUs."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """An optimizer step, as the stage that trains cuts it."""

    microbatches: int
    """Micro-batches of each rank."""
    micro_batch: int
    """Samples of one."""
    of_rank: int
    """Samples of the rank that has most."""
    samples: int
    """Over all ranks."""
    tokens: int
    """Over all ranks, padding counted."""
    length: Length = field(default_factory=Length)
    """Length of the whole training."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of one rank in an optimizer step, in floating-point operations and bytes."""

    products: float
    """Products of matrices, forward and backward."""
    attention: float
    """Attention kernels, between tokens that see each other."""
    again: float
    """Operations that are done a second time."""
    moved: float
    """Bytes that the device reads from and writes to its memory beside products: every tensor that
    is made, once each way, and what the optimizer updates."""

    @property
    def useful(self) -> float:
        """Operations of the model itself."""
        return self.products + self.attention

    @property
    def total(self) -> float:
        """All operations."""
        return self.useful + self.again


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Files that a stage writes."""

    what: str
    bytes: int
    formula: str


@dataclass(frozen=True, kw_only=True)
class HostNeed:
    """Host memory of one node that a stage takes at some time, beyond the step's."""

    phase: str
    """Empty: in all of them from when the model is loaded."""
    what: str
    bytes: int
    formula: str


@dataclass(frozen=True, kw_only=True)
class Extras:
    """Needs of a stage beside the step, as of one that saves or exports. `Extras()` says
    that it needs nothing to speak of."""

    storage: Sequence[Storage] = ()
    saved: Callable[[Length], Storage] | None = None
    """Files of which a longer training leaves more."""
    host: Sequence[HostNeed] = ()
    caveats: Sequence[str] = ()
    """Needs that this leaves out of account."""

    def files(self, length: Length) -> Iterator[Storage]:
        """All that is written in a training of that length."""
        yield from self.storage
        if self.saved is not None:
            yield self.saved(length)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Needs of one recipe at one place, in bytes."""

    device: Mapping[str, Held]
    """Phase -> what the fullest rank's device holds at its peak."""
    host: Mapping[str, Held]
    """Phase -> what the fullest node's memory holds at its peak, files' cache not counted."""
    disk: Mapping[str, int]
    """Offloaded state on one node's disk, by item."""
    storage: Sequence[Storage]
    formulas: Mapping[str, str]
    """Item -> how it comes about."""
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
    caveats = tuple(_caveats(told))
    why = "; ".join(["this recipe cannot be planned: {}", *caveats])
    profile: Profile = told.require(Profile, "the model has no profile")
    step = told.require(Step, why.format("no slot tells how it trains"))
    strategy: StrategyMemory = told.require(StrategyMemory, why.format("no slot wraps the model"))
    peaks = step_peaks(profile, strategy, samples=step.micro_batch, microbatches=step.microbatches)
    extras = [*told.each(Extras)]
    on_cpu = topology.device == "cpu"
    device = traced or peaks.of("device")
    held = peaks.of("host", both=on_cpu)
    needs = [need for extra in extras for need in extra.host]
    formulas = peaks.formulas | {need.what: need.formula for need in needs}
    disk = {item: size for one in peaks.of("disk").values() for item, size in one.items.items()}
    offloaded = profile.total("offloaded", "forward").at(step.of_rank)
    copies = strategy.copies(step.microbatches)
    return Estimate(
        device=device,
        host=_host(topology, device if traced and on_cpu else held, needs),
        disk={item: size * topology.on_node for item, size in disk.items()},
        storage=[file for extra in extras for file in extra.files(step.length)],
        formulas=formulas | {PROCESSES: f"{PROCESS / GIB:.1f} GiB a process, as measured on CPUs"},
        traffic=[*strategy.traffic(step.microbatches)],
        copies=replace(copies, up=copies.up + offloaded, down=copies.down + offloaded),
        step=step,
        work=_work(profile, strategy, step),
        caveats=caveats,
    )


def _work(profile: Profile, strategy: StrategyMemory, step: Step) -> Work:
    samples = step.of_rank

    def total(field: str) -> float:
        line = profile.total(field)
        return line.fixed * step.microbatches + line.each * samples

    return Work(
        products=total("products"),
        attention=total("attention"),
        again=total("again"),
        moved=2 * total("made") + strategy.updated,
    )


def _host(
    topology: Topology, held: Mapping[str, Held], needs: Sequence[HostNeed]
) -> dict[str, Held]:
    ranks = topology.on_node
    base = {PROCESSES: PROCESS * ranks}
    phases = {
        phase: base | {item: size * ranks for item, size in one.items.items()}
        for phase, one in held.items()
    }
    for need in needs:
        for phase in [need.phase] if need.phase else [one for one in held if one != LOAD]:
            items = phases.setdefault(phase, dict(base))
            items[need.what] = items.get(need.what, 0) + need.bytes
    return {phase: Held.of(items) for phase, items in phases.items()}


def _caveats(told: Results) -> Iterator[str]:
    """Say what is left out of account."""
    model, samples = told.latest(ModelShape), told.latest(SampleShape)
    if model and samples and model.context is not None and samples.length > model.context:
        yield (
            f"samples of {samples.length} tokens are longer than the {model.context} positions "
            "that the model's config states"
        )
    tellers = [model, *told.each(Extras)]
    yield from (caveat for teller in tellers if teller for caveat in teller.caveats)
