"""Combine a model's profile and a strategy's memory at every moment of a step, and add the needs of
all other slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.chain.binding import Results
from pipeline.hardware.gpus import GIB
from pipeline.planning import forecast
from pipeline.planning.forecast import (
    Extra,
    Gradients,
    Held,
    Item,
    Moment,
    PipelineRank,
    StrategyMemory,
    Unit,
)
from pipeline.planning.moments import KEPT, LOGITS, OFFLOADED, held, inside
from pipeline.planning.pipelined import PipelinePeaks, amounts, exchanged
from pipeline.planning.planner import Job, forecasts, require_told
from pipeline.planning.profile import ZERO, Line, Peak, Profile
from pipeline.planning.shapes import ModelShape, Step
from pipeline.planning.topology import Topology

PROCESSES = "processes"
PROCESS = round(0.6 * GIB)
"""Bytes of host memory of a process that has loaded the libraries, measured on CPUs."""
PASSES = ((True, True),), ((True, False), (False, True))
"""Micro-batches that represent a step of one and a step of several, as (first, last): the first
finds no gradients. Micro-batches in between need no more memory."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Floating-point operations of one rank in an optimizer step, as in `Part`; in a pipeline, of
    the rank with the most. moved: bytes to and from its memory beside products, that is each new
    tensor, twice, and the update's. idle: share of the step in which it waits for other stages."""

    products: float
    attention: float
    again: float
    moved: float
    idle: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Needs of one recipe in bytes. device, host: peaks of the fullest rank's device and of the
    fullest node's memory by phase, page cache not counted. offloaded: state on a node's disk by
    item."""

    device: Mapping[str, Held]
    host: Mapping[str, Held]
    offloaded: Mapping[str, int]
    storage: Sequence[Extra]
    traffic: Sequence[forecast.Traffic]
    copies: forecast.Copies
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
    """The model's profile, every slot's forecast, and a sentence for each slot without one. Raises
    the planners' errors, and UsageError if nothing forecasts the strategy or a step."""
    known = Results.of(profile, profile.model, job.samples, job.step)
    results, silent = forecasts(job.plan, job.topology, job.planners, known)
    require_told(job.plan, silent)
    results |= Results.of(tuple(silent.values()))
    return results


def combine(topology: Topology, results: Results) -> Estimate:
    """Combine the forecasts of all planners. Raises UsageError without a planner that forecasts a
    strategy or a step."""
    model = results.require(ModelShape, "the model has no shape")
    caveats, extras = (*model.caveats, *results.each(str)), [*results.each(Extra)]
    why = "this recipe cannot be planned: {}"
    profile = results.require(Profile, "the model has no profile")
    step = results.require(Step, why.format("no slot forecasts a training step"))
    share: StrategyMemory = results.require(StrategyMemory, why.format("no slot wraps the model"))
    peaks = step_peaks(profile, share, samples=step.micro_batch, microbatches=step.microbatches)
    host = peaks["both" if topology.device == "cpu" else "host"]
    disk = {item: size for one in peaks["disk"].values() for item, size in one.items.items()}
    waiting = round(_of_step(profile.total("offloaded", "forward"), step))
    copies = share.copies(step.microbatches)
    return Estimate(
        device=peaks["device"],
        host=_host(topology, host, extras),
        offloaded={item: size * topology.on_node for item, size in disk.items()},
        storage=[extra for extra in extras if not extra.phases],
        traffic=_joined(_traffic(profile, share, step)),
        copies=replace(copies, up=copies.up + waiting, down=copies.down + waiting),
        step=step,
        work=_work(profile, share, step),
        caveats=(*caveats, *share.caveats),
    )


def _work(profile: Profile, share: StrategyMemory, step: Step) -> Work:
    names = "products", "attention", "again", "made"
    total = {name: _of_step(profile.total(name), step) for name in names}
    slowest, idle = _slowest(profile, share, step), 0.0
    if slowest is not None:
        samples, idle = step.micro_batch, slowest.idle
        total = {name: amounts(profile, slowest, name, samples) for name in names}
    return Work(moved=2 * total.pop("made") + share.updated, idle=idle, **total)


def _slowest(profile: Profile, share: StrategyMemory, step: Step) -> PipelineRank | None:
    """The rank of a pipeline with the most products; None without a pipeline."""
    ranks = share.pipeline(step.microbatches)
    return max(
        ranks,
        key=lambda one: amounts(profile, one, "products", step.micro_batch),
        default=None,
    )


def _traffic(profile: Profile, share: StrategyMemory, step: Step) -> Iterator[forecast.Traffic]:
    """Traffic of a step: that which shards the model, and that inside of the model."""
    slowest = _slowest(profile, share, step)
    if slowest is not None:
        for stage in slowest.stages:
            yield from stage.memory.traffic(slowest.microbatches)
        yield from exchanged(profile, slowest, step.micro_batch)
        return
    yield from share.traffic(step.microbatches)
    for one in profile.exchanges():
        yield one.traffic(_of_step(one.bytes, step))


def _joined(every: Iterable[forecast.Traffic]) -> list[forecast.Traffic]:
    """Equal kinds of traffic as one."""
    found: dict[forecast.Traffic, int] = {}
    for one in every:
        kind = replace(one, bytes=0)
        found[kind] = found.get(kind, 0) + one.bytes
    return [replace(kind, bytes=size) for kind, size in found.items()]


def _of_step(line: Line, step: Step) -> float:
    """An amount of all micro-batches of a rank's step."""
    return line.fixed * step.microbatches + line.each * step.of_rank


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
    """Place (`device`, `host`, `disk`, or `both` for the first two together) -> phase -> the peak:
    of loading, of a step of `microbatches` micro-batches of `samples` samples, of saving and of
    resuming."""
    tops: dict[str, dict[str, Held]] = {"device": {}, "host": {}, "disk": {}, "both": {}}
    for phase, items in _noted(profile, share, samples, microbatches):
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
    """Each moment's phase, and everything that is held then."""
    ranks = share.pipeline(microbatches)
    for rank in ranks:
        yield from PipelinePeaks(profile, rank, share.averaged, samples=samples).noted()
    if not ranks:
        yield from _noted_alone(profile, share, samples, min(microbatches, 2))


def _noted_alone(
    profile: Profile, share: StrategyMemory, samples: int, microbatches: int
) -> Iterator[tuple[str, Iterable[Item]]]:
    yield forecast.LOAD, held(share, Moment("load"))
    for first, last in PASSES[microbatches - 1]:
        yield from _pass(profile, share, samples, first=first, last=last)
    yield forecast.UPDATE, held(share, Moment("step"))
    for phase in (forecast.UPDATE, forecast.SAVE, forecast.RESUME):
        yield phase, held(share, Moment("between"))


def _moments(blocks: int, *, first: bool, last: bool) -> Iterator[tuple[str, Moment]]:
    """Phases and moments of a micro-batch, in order."""
    units: list[Unit] = ["embeddings", *range(blocks), "head"]
    for unit in units:
        yield forecast.FORWARD, Moment("gather", unit, first, last)
        yield forecast.FORWARD, Moment("forward", unit, first, last)
    yield forecast.FORWARD, Moment("loss", "head", first, last)
    yield forecast.BACKWARD, Moment("begin", "head", first, last)
    for unit in reversed(units):
        for event in forecast.IN_BACKWARD:
            if event != "regather" or isinstance(unit, int):
                yield forecast.BACKWARD, Moment(event, unit, first, last)


def _pass(
    profile: Profile, share: StrategyMemory, samples: int, *, first: bool, last: bool
) -> Iterator[tuple[str, Iterable[Item]]]:
    """Each moment's phase in one micro-batch of `samples` samples, and everything held then."""
    kept = logits = host = 0
    for phase, moment in _moments(len(profile.model.blocks), first=first, last=last):
        part, at_head = profile.part(moment.event, moment.unit), moment.unit == "head"
        if moment.event == "reduce":  # the head's backward is over
            kept, logits = kept + logits, 0
        items = [
            *held(share, moment),
            Item(KEPT, "device", kept),
            Item(LOGITS, "device", logits),
            Item(OFFLOADED, "host", host),
        ]
        left = share.gradients(moment) if moment.event == "backward" else Gradients(0, 0)
        for peak in part.peaks or (Peak(ZERO),):
            yield phase, [*items, *inside(peak, left, samples, at_head=at_head)]
        host += part.offloaded.at(samples)
        logits += part.kept.at(samples) * at_head
        kept += part.kept.at(samples) * (not at_head)
