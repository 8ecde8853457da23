"""Needs of a recipe at a place: a profile and a strategy's share together at every moment of a
step, and what other slots' planners tell beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.hardware.gpus import GIB
from pipeline.plan.binding import Results
from pipeline.planning import strategy
from pipeline.planning.planner import Job, Topology, forecasts
from pipeline.planning.profile import ZERO, Peak, Profile
from pipeline.planning.shapes import ModelShape, Step
from pipeline.planning.strategy import Gradients, Held, Item, Moment, StrategyMemory, Unit

PROCESSES = "processes"
PROCESS = round(0.6 * GIB)
"""Bytes of host memory of a process that has loaded the libraries, measured on CPUs."""


KEPT, COMPUTED, LOGITS = "activations for backward", "being computed", "logits and loss"
AVERAGE = "average of weights"
OFFLOADED = "offloaded activations"
PASSES = ((True, True),), ((True, False), (False, True))
"""Micro-batches that tell of a step of one, and of one of several: whether no gradients are there,
whether it is the last. What is between the first and the last needs no more than these."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Floating-point operations of one rank in an optimizer step, as those of a `Part`. `moved` are
    bytes to and from its memory beside products: each tensor that is made, both ways, and what is
    updated."""

    products: float
    attention: float
    again: float
    moved: float


@dataclass(frozen=True)
class Extra:
    """Bytes that a stage needs beside the step: memory of one host in some phases, or files."""

    what: str
    bytes: int
    phases: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Needs of one recipe at one place, in bytes: by phase, what the fullest rank's device and the
    fullest node's memory hold at their peaks, files' cache not counted; by item, state that is
    offloaded to a node's disk."""

    device: Mapping[str, Held]
    host: Mapping[str, Held]
    offloaded: Mapping[str, int]
    storage: Sequence[Extra]
    traffic: Sequence[strategy.Traffic]
    copies: strategy.Copies
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


def ask_planners(job: Job, profile: Profile) -> Results:
    """The model, what every slot's planner tells, and which slots tell nothing. Raises what
    planners raise."""
    known = Results.of(profile, profile.model, job.step)
    return forecasts(job.plan, job.topology, job.planners, known)


def combine(
    topology: Topology, results: Results, *, traced: Mapping[str, Held] | None = None
) -> Estimate:
    """Put together what planners have results; `traced` stands for the device's memory. Raises
    UsageError where nobody tells of a strategy or of a step."""
    model = results.require(ModelShape, "the model has no shape")
    caveats, extras = (*model.caveats, *results.each(str)), [*results.each(Extra)]
    why = "; ".join(["this recipe cannot be planned: {}", *caveats])
    profile: Profile = results.require(Profile, "the model has no profile")
    step = results.require(Step, why.format("no slot tells how it trains"))
    share: StrategyMemory = results.require(StrategyMemory, why.format("no slot wraps the model"))
    peaks = step_peaks(profile, share, samples=step.micro_batch, microbatches=step.microbatches)
    device = traced or peaks["device"]
    on_cpu = topology.device == "cpu"
    host = device if traced and on_cpu else peaks["both" if on_cpu else "host"]
    disk = {item: size for one in peaks["disk"].values() for item, size in one.items.items()}
    line = profile.total("offloaded", "forward")
    waiting = round(line.fixed * step.microbatches + line.each * step.of_rank)
    copies = share.copies(step.microbatches)
    return Estimate(
        device=device,
        host=_host(topology, host, extras),
        offloaded={item: size * topology.on_node for item, size in disk.items()},
        storage=[extra for extra in extras if not extra.phases],
        traffic=[*share.traffic(step.microbatches)],
        copies=replace(copies, up=copies.up + waiting, down=copies.down + waiting),
        step=step,
        work=_work(profile, share, step),
        caveats=caveats,
    )


def _work(profile: Profile, share: StrategyMemory, step: Step) -> Work:
    def total(field: str) -> float:
        line = profile.total(field)
        return line.fixed * step.microbatches + line.each * step.of_rank

    names = "products", "attention", "again"
    moved = 2 * total("made") + share.updated
    return Work(moved=moved, **{name: total(name) for name in names})


def _host(topology: Topology, held: Mapping[str, Held], extras: Sequence[Extra]) -> dict[str, Held]:
    ranks = topology.on_node
    base = {PROCESSES: PROCESS * ranks}
    phases = {
        phase: Counter(base | {item: size * ranks for item, size in one.items.items()})
        for phase, one in held.items()
    }
    for extra in extras:
        for phase in extra.phases:
            phases.setdefault(phase, Counter(base))[extra.what] += extra.bytes
    return {phase: Held.of(items) for phase, items in phases.items()}


def step_peaks(
    profile: Profile, share: StrategyMemory, *, samples: int, microbatches: int
) -> dict[str, dict[str, Held]]:
    """Place, or `both` for device and host together -> phase -> the most that is held, of loading,
    a step with micro-batches of so many samples, saving and resuming."""
    tops: dict[str, dict[str, Held]] = {"device": {}, "host": {}, "disk": {}, "both": {}}
    for phase, items in _noted(profile, share, samples, min(microbatches, 2)):
        held = {place: Counter[str]() for place in tops}
        for item in items:
            held[item.where][item.name] += item.bytes
        held["both"].update(held["device"])
        held["both"].update(held["host"])
        for place, sizes in held.items():
            if phase not in tops[place] or sizes.total() > tops[place][phase].bytes:
                tops[place][phase] = Held.of(sizes)
    return tops


def _noted(
    profile: Profile, share: StrategyMemory, samples: int, microbatches: int
) -> Iterator[tuple[str, Iterable[Item]]]:
    """Phases and what is held at each of their moments."""
    yield strategy.LOAD, _held(share, Moment("load"))
    for first, last in PASSES[microbatches - 1]:
        yield from _pass(profile, share, samples, first=first, last=last)
    yield strategy.UPDATE, _held(share, Moment("step"))
    for phase in (strategy.UPDATE, strategy.SAVE, strategy.RESUME):
        yield phase, _held(share, Moment("between"))


def _held(share: StrategyMemory, moment: Moment) -> Iterator[Item]:
    """Items that a strategy holds at a moment, and averages of the weights that a rank updates."""
    yield from share.held(moment)
    if moment.event != "load":
        elements, place = share.masters
        yield Item(AVERAGE, place, share.averaged * elements)


def _moments(blocks: int, *, first: bool, last: bool) -> Iterator[tuple[str, Moment]]:
    """Phases and moments of a micro-batch, in order."""
    units: list[Unit] = ["embeddings", *range(blocks), "head"]
    for unit in units:
        yield strategy.FORWARD, Moment("gather", unit, first, last)
        yield strategy.FORWARD, Moment("forward", unit, first, last)
    yield strategy.FORWARD, Moment("loss", "head", first, last)
    yield strategy.BACKWARD, Moment("begin", "head", first, last)
    for unit in reversed(units):
        for event in strategy.IN_BACKWARD:
            if event != "regather" or isinstance(unit, int):
                yield strategy.BACKWARD, Moment(event, unit, first, last)


def _pass(
    profile: Profile, share: StrategyMemory, samples: int, *, first: bool, last: bool
) -> Iterator[tuple[str, Iterable[Item]]]:
    """Phases and what is held at every moment of a micro-batch of so many samples."""
    kept = logits = host = 0
    for phase, moment in _moments(len(profile.model.blocks), first=first, last=last):
        part, at_head = profile.part(moment.event, moment.unit), moment.unit == "head"
        if moment.event == "reduce":  # the head is through
            kept, logits = kept + logits, 0
        items = [
            *_held(share, moment),
            Item(KEPT, "device", kept),
            Item(LOGITS, "device", logits),
            Item(OFFLOADED, "host", host),
        ]
        left = share.gradients(moment) if moment.event == "backward" else Gradients(0, 0)
        for peak in part.peaks or (Peak(ZERO),):
            yield phase, [*items, *_inside(peak, left, samples, at_head=at_head)]
        host += part.offloaded.at(samples)
        logits += part.kept.at(samples) * at_head
        kept += part.kept.at(samples) * (not at_head)


def _inside(peak: Peak, left: Gradients, samples: int, *, at_head: bool) -> Iterator[Item]:
    """Items that are held beside those in the midst of a part."""
    size = peak.bytes.at(samples)
    what = LOGITS if at_head else COMPUTED
    yield Item(what, "device", max(size, 0))
    # What is given back meanwhile is part of what was kept.
    yield Item(LOGITS if at_head else KEPT, "device", min(size, 0))
    unreduced = left.kept * peak.arrived + left.passing * peak.newest
    yield Item(strategy.WHOLE_GRADIENTS, "device", unreduced)
