"""Memory and work of a rank of a pipeline: its passes one after another, in a schedule's order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pipeline.planning.forecast import (
    BACKWARD,
    FORWARD,
    IN_BACKWARD,
    LOAD,
    RESUME,
    SAVE,
    UPDATE,
    Gradients,
    Item,
    Kind,
    Moment,
    PipelineRank,
    PipelineStage,
    Traffic,
    Unit,
)
from pipeline.planning.moments import KEPT, LOGITS, OFFLOADED, held, inside
from pipeline.planning.profile import ZERO, Peak, Profile

PASSED = "passed between stages"
DEFERRED = "gradients for the weights' half of backward"
Candidates = list[list[Item]]


@dataclass
class _State:
    """A stage between its passes. first: no gradient is waiting; whole: its units are gathered;
    over: its gradients are reduced. waiting: what micro-batches between forward and backward keep,
    as items by micro-batch."""

    first: bool = True
    whole: bool = False
    over: bool = False
    waiting: dict[int, list[Item]] = field(default_factory=dict)


class PipelinePeaks:
    """Everything that a rank holds in a step of micro-batches of `samples` samples."""

    def __init__(
        self, profile: Profile, rank: PipelineRank, averaged: int, *, samples: int
    ) -> None:
        self._rank, self._averaged, self._samples = rank, averaged, samples
        self._profiles = [_stage(profile, one) for one in rank.stages]
        self._known: dict[tuple[Kind, int, bool, bool], Candidates] = {}
        self._states = [_State() for _ in rank.stages]

    def noted(self) -> Iterator[tuple[str, list[Item]]]:
        """Each fullest moment's phase, and everything that is held then."""
        yield LOAD, self._all(Moment("load"))
        passing = [*self._buffers()]
        for kind, number, batch in self._rank.passes:
            state = self._states[number]
            if kind == "release":
                state.whole = False
                continue
            others = [*self._beside(number, batch), *passing]
            key = kind, number, state.first, state.whole
            if key not in self._known:
                self._known[key] = _fullest([*self._moments(*key)])
            phase = FORWARD if kind == "forward" else BACKWARD
            if kind == "forward":
                own: list[Item] = []
            else:
                own = state.waiting.get(batch, [])
            for items in self._known[key]:
                yield phase, [*items, *own, *others]
            self._move(kind, number, batch)
        yield UPDATE, [*self._all(Moment("step")), *passing]
        for phase in (UPDATE, SAVE, RESUME):
            yield phase, [*self._all(Moment("between")), *passing]

    def _all(self, moment: Moment) -> list[Item]:
        stages = self._rank.stages
        return [item for one in stages for item in held(one.memory, moment, self._averaged)]

    def _buffers(self) -> Iterator[Item]:
        """Buffers that stay from one step to the next."""
        for one in self._rank.stages:
            size = (one.hidden * one.received + one.tokens) * self._samples
            size *= self._rank.microbatches
            yield Item(PASSED, "device", size)

    def _beside(self, running: int, batch: int) -> Iterator[Item]:
        """Items held beside the running stage and its micro-batch."""
        for number, (stage, state) in enumerate(zip(self._rank.stages, self._states, strict=True)):
            for other, kept in state.waiting.items():
                if (number, other) != (running, batch):
                    yield from kept
            if number != running:
                moment = Moment("rest", "head", state.first, state.over, state.whole)
                yield from held(stage.memory, moment, self._averaged)

    def _move(self, kind: Kind, number: int, batch: int) -> None:
        """Update the stage's state after a pass."""
        state, stage = self._states[number], self._rank.stages[number]
        if kind == "forward":
            state.waiting[batch] = _kept(self._profiles[number], stage, self._samples)
        elif kind in ("backward", "weights"):
            state.waiting.pop(batch, None)
        elif kind == "inputs":  # the loss is done with, gradients of weights need the rest
            kept = [one for one in state.waiting[batch] if one.name != LOGITS]
            deferred = self._profiles[number].total("deferred").at(self._samples)
            state.waiting[batch] = [*kept, Item(DEFERRED, "device", deferred)]
        if kind == "forward":
            state.whole = stage.stays
        elif kind == "reduce":
            state.whole, state.over = False, True
        else:
            state.whole = True
            state.first = state.first and kind in ("gather", "inputs")

    def _moments(self, kind: Kind, number: int, first: bool, whole: bool) -> Iterator[list[Item]]:
        """Items of the running stage at each moment of a pass, without those that the micro-batch
        had kept before."""
        stage, profile = self._rank.stages[number], self._profiles[number]
        units: list[Unit] = ["embeddings", *range(len(stage.blocks))]
        units += ["head"] if stage.last else []
        if kind == "forward":
            yield from self._forward(stage, profile, units, first=first, whole=whole)
        elif kind == "reduce":
            for unit in units:
                moment = Moment("reduce", unit, False, True, True)
                yield [*held(stage.memory, moment, self._averaged)]
        elif kind == "gather":
            yield [*held(stage.memory, Moment("regather", "head", first, False), self._averaged)]
        elif kind == "weights":
            moment = Moment("weights", "head", first, False, whole)
            deferred = profile.total("deferred").at(self._samples)
            yield [
                *held(stage.memory, moment, self._averaged), Item(DEFERRED, "device", -deferred),
            ]  # fmt: skip
        else:
            frees = kind == "backward"
            yield from self._backward(stage, profile, units, first=first, whole=whole, frees=frees)

    def _forward(
        self, stage: PipelineStage, profile: Profile, units: Sequence[Unit], *, first: bool,
        whole: bool,
    ) -> Iterator[list[Item]]:  # fmt: skip
        kept = Counter[str]()
        for unit in units:
            events = ("gather", "forward", "loss") if unit == "head" else ("gather", "forward")
            for event in events:
                moment = Moment(event, unit, first, False, whole)  # type: ignore[arg-type]
                yield from self._inside(stage, profile, moment, _items(kept))
                _count(kept, profile, moment, self._samples)

    def _backward(
        self, stage: PipelineStage, profile: Profile, units: Sequence[Unit], *, first: bool,
        whole: bool, frees: bool,
    ) -> Iterator[list[Item]]:  # fmt: skip
        kept = Counter[str]()
        if stage.last:
            moment = Moment("begin", "head", first, False, whole)
            yield from self._inside(stage, profile, moment, _items(kept))
            _count(kept, profile, moment, self._samples)
        for unit in reversed(units):
            for event in IN_BACKWARD:
                if event == "regather" and not isinstance(unit, int):
                    continue
                moment = Moment(event, unit, first, False, whole)
                yield from self._inside(stage, profile, moment, _items(kept))
                if frees or unit == "head":
                    _count(kept, profile, moment, self._samples)
                if not frees:
                    deferred = profile.part(event, unit).deferred
                    kept[DEFERRED] += deferred.at(self._samples)

    def _inside(
        self, stage: PipelineStage, profile: Profile, moment: Moment, kept: list[Item]
    ) -> Iterator[list[Item]]:
        share = stage.memory
        left = share.gradients(moment) if moment.event == "backward" else Gradients(0, 0)
        items = [*held(share, moment, self._averaged), *kept]
        at_head = moment.unit == "head"
        for peak in profile.part(moment.event, moment.unit).peaks or (Peak(ZERO),):
            yield [*items, *inside(peak, left, self._samples, at_head=at_head)]


def _count(kept: Counter[str], profile: Profile, moment: Moment, samples: int) -> None:
    """Add what a part of the model keeps, or frees."""
    part = profile.part(moment.event, moment.unit)
    kept[LOGITS if moment.unit == "head" else KEPT] += part.kept.at(samples)
    kept[OFFLOADED] += part.offloaded.at(samples)


def _items(kept: Counter[str]) -> list[Item]:
    return [Item(name, "host" if name == OFFLOADED else "device", n) for name, n in kept.items()]


def _kept(profile: Profile, stage: PipelineStage, samples: int) -> list[Item]:
    """Items that a micro-batch keeps from forward to backward."""
    kept = Counter[str]()
    units: list[Unit] = ["embeddings", *range(len(stage.blocks)), "head"]
    for unit in units:
        for event in ("forward", "loss"):
            _count(kept, profile, Moment(event, unit), samples)
    return _items(kept)


def _fullest(moments: Candidates) -> Candidates:
    """The moments that hold the most in one place, or in all."""

    def size(items: list[Item], place: str) -> int:
        return sum(one.bytes for one in items if place in ("both", one.where))

    best = (max(moments, key=lambda one: size(one, place)) for place in ("device", "host", "both"))
    return list({id(one): one for one in best}.values())


def amounts(profile: Profile, rank: PipelineRank, name: str, samples: int) -> float:
    """An amount of the profile, such as operations, of all of a rank's passes."""
    lines = (_stage(profile, one).total(name) for one in rank.stages)
    return sum(line.at(samples) for line in lines) * rank.microbatches


def exchanged(profile: Profile, rank: PipelineRank, samples: int) -> Iterator[Traffic]:
    """Traffic while a rank's stages compute, and of the hidden states that it passes on."""
    for one in rank.stages:
        for exchange in _stage(profile, one).exchanges():
            yield exchange.traffic(exchange.bytes.at(samples) * rank.microbatches)
    size = sum(one.hidden * one.received for one in rank.stages) * samples * rank.microbatches
    yield Traffic(
        collective="send", bytes=size, ranks=rank.ranks, apart=rank.apart,
        what="hidden states and their gradients",
    )  # fmt: skip


def _stage(profile: Profile, one: PipelineStage) -> Profile:
    return profile.stage(one.blocks, first=one.first, last=one.last)
