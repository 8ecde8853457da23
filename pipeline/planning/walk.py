"""Walk over an optimizer step: everything that a rank holds at each moment of its passes.

A rank that has the whole model is the only stage of a pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pipeline.planning import forecast
from pipeline.planning.forecast import Event, Held, Item, Moment, Pass, PipelineRank, PipelineStage
from pipeline.planning.profile import ZERO, Peak, Profile

KEPT, COMPUTED, LOGITS = "activations for backward", "being computed", "logits and loss"
AVERAGE, OFFLOADED = "average of weights", "offloaded activations"
PASSED, DEFERRED = "passed between stages", "gradients for the weights' half of backward"
PLACES: dict[str, Sequence[forecast.Place]] = {
    "device": ("device",), "host": ("host",), "disk": ("disk",), "both": ("device", "host"),
}  # fmt: skip
"""Places by name; `both` are the first two together."""
ENDING = ("backward", "inputs", "weights")
"""Kinds of passes that need what forward has kept."""


def step_peaks(
    profile: Profile, share: forecast.StrategyMemory, *, samples: int, microbatches: int
) -> dict[str, dict[str, Held]]:
    """Place (`PLACES`) -> phase -> the peak on the fullest rank: of loading, of a step of
    `microbatches` micro-batches of `samples` samples, of saving and of resuming."""
    tops: dict[str, dict[str, Held]] = {place: {} for place in PLACES}
    for rank in ranks_of(profile, share, microbatches):
        for phase, items in _Walk(profile, rank, share.averaged, samples).moments():
            for place, peaks in tops.items():
                if phase not in peaks or _bytes(items, place) > peaks[phase].bytes:
                    sizes = Counter[str]()
                    for item in items:
                        sizes[item.name] += item.bytes * (item.where in PLACES[place])
                    peaks[phase] = Held.of(sizes)
    return tops


def ranks_of(
    profile: Profile, share: forecast.StrategyMemory, microbatches: int
) -> Sequence[PipelineRank]:
    """Ranks of a pipeline; without one, the rank that stands for all. Its micro-batches between the
    first, which finds no gradients, and the last need no more memory than these."""
    count = min(microbatches, 2)
    kinds: Sequence[forecast.Kind] = ("forward", "backward")
    passes = [Pass(kind, 0, n, last=n == count - 1) for n in range(count) for kind in kinds]
    whole = PipelineStage(blocks=range(len(profile.model.blocks)), memory=share)
    single = PipelineRank(stages=[whole], passes=passes, microbatches=microbatches)
    return share.pipeline(microbatches) or [single]


def stage_profiles(profile: Profile, rank: PipelineRank) -> list[Profile]:
    """Profiles of a rank's stages."""
    return [profile.stage(one.blocks, first=one.first, last=one.last) for one in rank.stages]


def _events(kind: forecast.Kind, stage: PipelineStage) -> Iterator[tuple[Event, forecast.Unit]]:
    """Events of a pass, in order."""
    units: list[forecast.Unit] = ["embeddings", *range(len(stage.blocks))]
    units += ["head"] if stage.last else []
    if kind == "forward":
        for unit in units:
            yield "gather", unit
            yield "forward", unit
        if stage.last:
            yield "loss", "head"
    elif kind in ("backward", "inputs"):
        if stage.last:
            yield "begin", "head"
        yield from ((event, unit) for unit in reversed(units) for event in forecast.IN_BACKWARD)
    elif kind == "reduce":
        yield from (("reduce", unit) for unit in units)
    elif kind == "weights":
        yield "weights", "head"


@dataclass
class _State:
    """A stage between its passes. first: no gradient is waiting; last: all are reduced. waiting:
    bytes that micro-batches between forward and backward keep, by micro-batch and item."""

    first: bool = True
    last: bool = False
    waiting: dict[int, Counter[str]] = field(default_factory=dict)


class _Walk:
    """Everything that a rank holds in a step of micro-batches of `samples` samples. averaged: bytes
    of averages of each element that it updates."""

    def __init__(self, profile: Profile, rank: PipelineRank, averaged: int, samples: int) -> None:
        self._rank, self._averaged, self._samples = rank, averaged, samples
        self._profiles = stage_profiles(profile, rank)
        self._states = [_State() for _ in rank.stages]
        self._known: dict[tuple[object, ...], list[list[Item]]] = {}
        self._kept = [Counter[str]() for _ in rank.stages]
        """Bytes that a micro-batch keeps from forward to backward, by item."""
        for number, stage in enumerate(rank.stages):
            for event, unit in _events("forward", stage):
                self._count(self._kept[number], number, event, unit)

    def moments(self) -> Iterator[tuple[str, list[Item]]]:
        """Each fullest moment's phase, and everything that is held then."""
        count = self._samples * self._rank.microbatches
        passing = [  # buffers that stay from one step to the next
            Item(PASSED, "device", (one.hidden * one.received + one.tokens) * count)
            for one in self._rank.stages
        ]

        def all_at(event: Event) -> list[Item]:
            return [one for stage in self._rank.stages for one in self._held(stage, Moment(event))]

        yield forecast.LOAD, all_at("load")
        for one in self._rank.passes:
            state = self._states[one.stage]
            key = one.kind, one.stage, state.first, one.last or one.kind == "reduce"
            if key not in self._known:
                found = [*self._pass(one, Moment("load", "head", *key[2:]))]
                # The first that hold the most in one of the places.
                best = [max(found, key=lambda one: _bytes(one, at)) for at in PLACES if found]
                self._known[key] = [each for each in found if any(each is one for one in best)]
            others = [*self._others(one), *passing]
            for items in self._known[key]:
                phase = forecast.FORWARD if one.kind == "forward" else forecast.BACKWARD
                yield phase, [*items, *others]
            self._move(one, state)
        yield forecast.UPDATE, [*all_at("step"), *passing]
        for phase in (forecast.UPDATE, forecast.SAVE, forecast.RESUME):
            yield phase, [*all_at("between"), *passing]

    def _held(self, stage: PipelineStage, moment: Moment) -> Iterator[Item]:
        """Items of a stage's strategy, and the averages of the weights that the rank updates."""
        yield from stage.memory.held(moment)
        if moment.event != "load":
            elements, place = stage.memory.masters
            yield Item(AVERAGE, place, self._averaged * elements)

    def _others(self, running: Pass) -> Iterator[Item]:
        """Items of the stages that do not run, and of the micro-batches that do not."""
        for number, (stage, state) in enumerate(zip(self._rank.stages, self._states, strict=True)):
            for batch, kept in state.waiting.items():
                own = (number, batch) == (running.stage, running.microbatch)
                if not (own and running.kind in ENDING):
                    yield from _items(kept)
            if number != running.stage:
                yield from self._held(stage, Moment("rest", "head", state.first, state.last))

    def _move(self, done: Pass, state: _State) -> None:
        """Update the stage's state after a pass."""
        kind, stage = done.kind, self._rank.stages[done.stage]
        if kind == "forward":
            state.waiting[done.microbatch] = self._kept[done.stage]
        elif kind in ("backward", "weights"):
            state.waiting.pop(done.microbatch, None)
            state.first = False
        elif kind == "inputs":
            kept = Counter(self._kept[done.stage])
            kept[LOGITS], kept[DEFERRED] = 0, stage.deferred * self._samples
            state.waiting[done.microbatch] = kept
        state.last = state.last or kind == "reduce"

    def _pass(self, running: Pass, when: Moment) -> Iterator[list[Item]]:
        """Items of the running stage and of its micro-batch at each moment of a pass."""
        kind, number, stage = running.kind, running.stage, self._rank.stages[running.stage]
        kept = Counter(self._kept[number] if kind in ENDING else {})
        if kind == "weights":
            kept[LOGITS] = 0
        elif kind == "inputs":
            kept[DEFERRED] = stage.deferred * self._samples
        for event, unit in _events(kind, stage):
            if event == "reduce":  # the head's backward is over
                kept[KEPT] += kept.pop(LOGITS, 0)
            moment = when._replace(event=event, unit=unit)
            items = [*self._held(stage, moment), *_items(kept)]
            left = stage.memory.gradients(moment) if event == "backward" else (0, 0)
            for peak in self._profiles[number].part(event, unit).peaks or (Peak(ZERO),):
                size = peak.bytes.at(self._samples)
                # Memory freed meanwhile is part of what was kept.
                more, less = (LOGITS, LOGITS) if unit == "head" else (COMPUTED, KEPT)
                unreduced = round(left[0] * peak.arrived + left[1] * peak.newest)
                yield [
                    *items,
                    Item(more if size > 0 else less, "device", size),
                    Item(forecast.WHOLE_GRADIENTS, "device", unreduced),
                ]
            if kind != "inputs" or unit == "head":  # the weights' half needs the rest
                self._count(kept, number, event, unit)

    def _count(self, kept: Counter[str], stage: int, event: Event, unit: forecast.Unit) -> None:
        """Add what a part of the model keeps, or frees."""
        part = self._profiles[stage].part(event, unit)
        kept[LOGITS if unit == "head" else KEPT] += part.kept.at(self._samples)
        kept[OFFLOADED] += part.offloaded.at(self._samples)


def _items(kept: Counter[str]) -> list[Item]:
    return [Item(name, "host" if name == OFFLOADED else "device", n) for name, n in kept.items()]


def _bytes(items: Sequence[Item], place: str) -> int:
    return sum(one.bytes for one in items if one.where in PLACES[place])
