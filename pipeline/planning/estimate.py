"""Walk over an optimizer step: everything that a rank holds at each moment of its passes, computes
and sends, from a model's profile and a strategy's forecast; with the needs of all other slots.

A rank that has the whole model is the only stage of a pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.chain.artifacts import Results
from pipeline.hardware.gpus import GIB
from pipeline.planning import forecast
from pipeline.planning.forecast import Held, Item, Line, Moment, Profile, StrategyMemory, Traffic
from pipeline.planning.planner import Job, forecasts, require_told
from pipeline.planning.shapes import Step, Topology

PROCESS = round(0.6 * GIB)
"""Bytes of host memory of a process that has loaded the libraries, measured on CPUs."""
KEPT, COMPUTED, LOGITS = "activations for backward", "being computed", "logits and loss"
AVERAGE, OFFLOADED = "average of weights", "offloaded activations"
PASSED, DEFERRED = "passed between stages", "gradients for the weights' half of backward"
PLACES: dict[str, Sequence[forecast.Place]] = {
    "device": ("device",), "host": ("host",), "disk": ("disk",), "both": ("device", "host"),
}  # fmt: skip
"""Places by name; `both` are the first two together."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Floating-point operations of one rank in an optimizer step, as in `Part`; in a pipeline, of
    the rank with the most. moved: bytes to and from its memory next to products, that is each new
    tensor, twice, and the update's. idle: share of the step in which it waits for other stages."""

    products: float
    attention: float
    again: float
    moved: float
    idle: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Needs of one recipe in bytes. device, host: peaks of the fullest rank's device and of the
    fullest node's memory by phase, without page cache. offloaded: state on a node's disk."""

    device: Mapping[str, Held]
    host: Mapping[str, Held]
    offloaded: Mapping[str, int]
    storage: Sequence[forecast.Extra]
    traffic: Sequence[Traffic]
    copies: forecast.Copies
    step: Step
    work: Work
    caveats: Sequence[str] = ()

    @property
    def peak(self) -> int:
        return max((held.bytes for held in self.device.values()), default=0)

    @property
    def host_peak(self) -> int:
        return max((held.bytes for held in self.host.values()), default=0)


def ask_planners(job: Job, profile: Profile) -> Results:
    """The profile, every slot's forecast, and a sentence for each slot without one. Raises the
    planners' errors, and UsageError if nothing forecasts the strategy or a step."""
    known = Results.of(profile, profile.model, job.samples, job.step)
    results, silent = forecasts(job.plan, job.topology, job.planners, known)
    require_told(job.plan, silent)
    results |= Results.of(tuple(silent.values()))
    return results


def combine(topology: Topology, results: Results) -> Estimate:
    """Combine all forecasts. Raises UsageError without a strategy's or a step's."""
    why = "this recipe cannot be planned: {}"
    profile = results.require(Profile, "the model has no profile")
    step = results.require(Step, why.format("no slot forecasts a training step"))
    share: StrategyMemory = results.require(StrategyMemory, why.format("no slot wraps the model"))
    extras = [*results.each(forecast.Extra)]
    peaks = step_peaks(profile, share, samples=step.micro_batch, microbatches=step.microbatches)
    disk = {item: size for one in peaks["disk"].values() for item, size in one.items.items()}
    # Processes and their peaks, then what other slots need at the same time.
    ranks, base = topology.on_node, {"processes": PROCESS * topology.on_node}
    host = {
        phase: Counter(base | {item: size * ranks for item, size in held.items.items()})
        for phase, held in peaks["both" if topology.device == "cpu" else "host"].items()
    }
    for extra in extras:
        for phase in extra.phases:
            host.setdefault(phase, Counter(base))[extra.what] += extra.bytes
    every = ranks_of(profile, share, step.microbatches)
    found = (_of_rank(profile, one, step, share.updated) for one in every)
    work, waiting, traffic = max(found, key=lambda one: one[0].products)
    copies = share.copies(step.microbatches)
    return Estimate(
        device=peaks["device"],
        host={phase: Held.of(items) for phase, items in host.items()},
        offloaded={item: size * ranks for item, size in disk.items()},
        storage=[extra for extra in extras if not extra.phases],
        traffic=traffic,
        copies=replace(copies, up=copies.up + waiting, down=copies.down + waiting),
        step=step,
        work=work,
        caveats=(*profile.model.caveats, *results.each(str), *share.caveats),
    )


def _of_rank(
    profile: Profile, rank: forecast.PipelineRank, step: Step, updated: int
) -> tuple[Work, int, list[Traffic]]:
    """Work of a rank in a step, bytes that wait on its host for backward, and its traffic: of
    shards, inside of the model, and of hidden states; equal kinds as one."""
    profiles, sums = [profile.of_stage(one) for one in rank.stages], Counter[Traffic]()
    # Stages take micro-batches of equal shapes.
    samples = rank.microbatches * step.micro_batch if rank.ranks > 1 else step.of_rank

    def total(lines: Iterable[Line]) -> float:
        return sum(one.fixed * rank.microbatches + one.each * samples for one in lines)

    for stage in rank.stages:
        for one in stage.memory.traffic(rank.microbatches):
            sums[replace(one, bytes=0)] += one.bytes
    for _, part, count in (found for one in profiles for found in one.counted()):
        for kind, size in part.exchanges:
            sums[kind] += round(total([Line(size.fixed * count, size.each * count)]))
    if rank.ranks > 1:
        hidden = Traffic(
            collective="send", bytes=0, ranks=rank.ranks, apart=rank.apart,
            what="hidden states and their gradients",
        )  # fmt: skip
        sums[hidden] += sum(one.hidden * one.received for one in rank.stages) * samples
    fields = ("products", "attention", "again", "made")
    amounts = {name: total(one.total(name) for one in profiles) for name in fields}
    work = Work(moved=2 * amounts.pop("made") + updated, idle=rank.idle, **amounts)
    waiting = round(total(one.total("offloaded", "forward") for one in profiles))
    return work, waiting, [replace(kind, bytes=size) for kind, size in sums.items()]


def step_peaks(
    profile: Profile, share: StrategyMemory, *, samples: int, microbatches: int
) -> dict[str, dict[str, Held]]:
    """Place (`PLACES`) -> phase -> the peak on the fullest rank: of loading, of a step of
    `microbatches` micro-batches of `samples` samples, of saving and of resuming."""
    tops: dict[str, dict[str, Held]] = {place: {} for place in PLACES}
    for rank in ranks_of(profile, share, microbatches):
        for phase, items in moments(profile, rank, share.averaged, samples):
            for place, peaks in tops.items():
                if phase not in peaks or _bytes(items, place) > peaks[phase].bytes:
                    sizes = Counter[str]()
                    for item in items:
                        sizes[item.name] += item.bytes * (item.where in PLACES[place])
                    peaks[phase] = Held.of(sizes)
    return tops


def _bytes(items: Sequence[Item], place: str) -> int:
    return sum(one.bytes for one in items if one.where in PLACES[place])


def ranks_of(
    profile: Profile, share: StrategyMemory, microbatches: int
) -> Sequence[forecast.PipelineRank]:
    """Ranks of a pipeline; without one, the rank that stands for all. Its micro-batches between the
    first, which finds no gradients, and the last need no more memory than these."""
    count = min(microbatches, 2)
    kinds: Sequence[forecast.Kind] = ("forward", "backward")
    passes = [forecast.Pass(kind, 0, last=n == count - 1) for n in range(count) for kind in kinds]
    whole = forecast.PipelineStage(blocks=range(len(profile.model.blocks)), memory=share)
    single = forecast.PipelineRank(stages=[whole], passes=passes, microbatches=microbatches)
    return share.pipeline(microbatches) or [single]


def moments(
    profile: Profile, rank: forecast.PipelineRank, averaged: int, samples: int
) -> Iterator[tuple[str, list[Item]]]:
    """Each fullest moment's phase, and everything that a rank holds then in a step of micro-batches
    of `samples` samples. averaged: bytes of averages of each element that it updates."""
    stages = [_Stage(profile.of_stage(one), one, averaged, samples) for one in rank.stages]
    count, known = samples * rank.microbatches, dict[tuple[object, ...], list[list[Item]]]()
    passing = [  # buffers that stay from one step to the next
        Item(PASSED, "device", (one.hidden * one.received + one.tokens) * count)
        for one in rank.stages
    ]

    def all_at(event: forecast.Event) -> list[Item]:
        return [item for stage in stages for item in stage.held(Moment(event))]

    yield forecast.LOAD, all_at("load")
    for one in rank.passes:
        stage, others = stages[one.stage], list[Item]()
        key = one.kind, one.stage, stage.first, one.last or one.kind == "reduce"
        if key not in known:
            found = [*stage.run(one.kind, Moment("load", "head", *key[2:]))]
            # The first that hold the most in one of the places.
            best = [max(found, key=lambda items: _bytes(items, at)) for at in PLACES if found]
            known[key] = [each for each in found if any(each is items for items in best)]
        for other in stages:
            others += other.waits(one.kind if other is stage else None)
        phase = forecast.FORWARD if one.kind == "forward" else forecast.BACKWARD
        yield from ((phase, [*items, *others, *passing]) for items in known[key])
        stage.move(one.kind)
    yield forecast.UPDATE, [*all_at("step"), *passing]
    for phase in (forecast.UPDATE, forecast.SAVE, forecast.RESUME):
        yield phase, [*all_at("between"), *passing]


def _events(
    kind: forecast.Kind, stage: forecast.PipelineStage
) -> list[tuple[forecast.Event, forecast.Unit]]:
    units: list[forecast.Unit] = ["embeddings", *range(len(stage.blocks))]
    units += ["head"] if stage.last else []
    if kind == "weights":
        return [("weights", "head")]
    if kind == "reduce":
        return [("reduce", unit) for unit in units]
    if kind == "forward":
        ran: Sequence[forecast.Event] = ("gather", "forward")
        found = [(event, unit) for unit in units for event in ran]
        return [*found, ("loss", "head")] if stage.last else found
    found = [(event, unit) for unit in reversed(units) for event in forecast.IN_BACKWARD]
    return [("begin", "head"), *found] if stage.last else found


class _Stage:
    """A stage of a rank between its passes. first: no gradient is waiting; last: all are reduced.
    ahead, halved: micro-batches between forward and backward, and between halves of backward."""

    def __init__(
        self, profile: Profile, of: forecast.PipelineStage, averaged: int, samples: int
    ) -> None:
        self._profile, self._of, self._averaged, self._samples = profile, of, averaged, samples
        self.first, self.last, self.ahead, self.halved = True, False, 0, 0
        self._kept = Counter[str]()
        """Bytes that a micro-batch keeps from forward to backward, by item."""
        for event, unit in _events("forward", of):
            self._count(self._kept, event, unit)
        self._deferred = of.deferred * samples

    def held(self, moment: Moment) -> Iterator[Item]:
        """Items of the strategy, and the averages of the weights that the rank updates."""
        yield from self._of.memory.held(moment)
        if moment.event != "load":
            elements, place = self._of.memory.masters
            yield Item(AVERAGE, place, self._averaged * elements)

    def run(self, kind: forecast.Kind, when: Moment) -> Iterator[list[Item]]:
        """Items of the stage and of the running micro-batch at each moment of a pass."""
        kept = Counter(self._kept if kind not in ("forward", "reduce") else {})
        if kind == "weights":
            kept[LOGITS] = 0
        elif kind == "inputs":
            kept[DEFERRED] = self._deferred
        for event, unit in _events(kind, self._of):
            if event == "reduce":  # the head's backward is over
                kept[KEPT] += kept.pop(LOGITS, 0)
            moment = when._replace(event=event, unit=unit)
            items = [*self.held(moment), *_items(kept)]
            stays, passes = self._of.memory.gradients(moment) if event == "backward" else (0, 0)
            for peak in self._profile.part(event, unit).peaks or (forecast.Peak(forecast.ZERO),):
                size = peak.bytes.at(self._samples)
                # Memory freed meanwhile is part of what was kept.
                more, less = (LOGITS, LOGITS) if unit == "head" else (COMPUTED, KEPT)
                unreduced = round(stays * peak.arrived + passes * peak.newest)
                yield [
                    *items,
                    Item(more if size > 0 else less, "device", size),
                    Item(forecast.WHOLE_GRADIENTS, "device", unreduced),
                ]
            if kind != "inputs" or unit == "head":  # the weights' half needs the rest
                self._count(kept, event, unit)

    def _count(self, kept: Counter[str], event: forecast.Event, unit: forecast.Unit) -> None:
        """Add what a part of the model keeps, or frees."""
        part = self._profile.part(event, unit)
        kept[LOGITS if unit == "head" else KEPT] += part.kept.at(self._samples)
        kept[OFFLOADED] += part.offloaded.at(self._samples)

    def waits(self, running: forecast.Kind | None) -> Iterator[Item]:
        """Items of all micro-batches but the running one; and of the stage, if another runs."""
        later = {**self._kept, LOGITS: 0, DEFERRED: self._deferred}
        yield from _items(self._kept, self.ahead - (running in ("backward", "inputs")))
        yield from _items(later, self.halved - (running == "weights"))
        if running is None:
            yield from self.held(Moment("rest", "head", self.first, self.last))

    def move(self, done: forecast.Kind) -> None:
        self.ahead += (done == "forward") - (done in ("backward", "inputs"))
        self.halved += (done == "inputs") - (done == "weights")
        self.first &= done not in ("backward", "weights")
        self.last |= done == "reduce"


def _items(kept: Mapping[str, int], times: int = 1) -> list[Item]:
    """Items of what so many micro-batches keep."""
    known = kept.items() if times else ()
    return [Item(name, "host" if name == OFFLOADED else "device", n * times) for name, n in known]
