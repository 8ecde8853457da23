"""Walk over an optimizer step: everything that a rank holds at each moment of its passes.

A rank that has the whole model is the only stage of a pipeline.
"""

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
    WHOLE_GRADIENTS,
    Event,
    Gradients,
    Held,
    Item,
    Kind,
    Moment,
    Pass,
    PipelineRank,
    PipelineStage,
    Place,
    StrategyMemory,
    Unit,
)
from pipeline.planning.profile import ZERO, Part, Peak, Profile

KEPT, COMPUTED, LOGITS = "activations for backward", "being computed", "logits and loss"
AVERAGE = "average of weights"
OFFLOADED = "offloaded activations"
PASSED = "passed between stages"
DEFERRED = "gradients for the weights' half of backward"
PLACES: dict[str, Sequence[Place]] = {
    "device": ("device",), "host": ("host",), "disk": ("disk",), "both": ("device", "host"),
}  # fmt: skip
"""Places by name; `both` are the first two together."""
ENDING = ("backward", "inputs", "weights")
"""Kinds of passes that need what forward has kept."""
Kept = Counter[str]
"""Bytes that a micro-batch keeps for its backward, by item."""


def step_peaks(
    profile: Profile, share: StrategyMemory, *, samples: int, microbatches: int
) -> dict[str, dict[str, Held]]:
    """Place (`PLACES`) -> phase -> the peak on the fullest rank: of loading, of a step of
    `microbatches` micro-batches of `samples` samples, of saving and of resuming."""
    tops: dict[str, dict[str, Held]] = {place: {} for place in PLACES}
    for rank in ranks_of(profile, share, microbatches):
        for phase, items in StepWalk(profile, rank, share.averaged, samples=samples).moments():
            for place, peaks in tops.items():
                size = _bytes(items, place)
                if phase not in peaks or size > peaks[phase].bytes:
                    sizes = Counter[str]()
                    for item in _within(items, place):
                        sizes[item.name] += item.bytes
                    peaks[phase] = Held.of(sizes)
    return tops


def ranks_of(profile: Profile, share: StrategyMemory, microbatches: int) -> Sequence[PipelineRank]:
    """Ranks of a pipeline; without one, the rank that stands for all. Its micro-batches between the
    first, which finds no gradients, and the last need no more memory than these."""
    count = min(microbatches, 2)
    passes = [
        Pass(kind, 0, batch, last=batch == count - 1)
        for batch in range(count)
        for kind in ("forward", "backward")
    ]
    whole = PipelineStage(
        blocks=range(len(profile.model.blocks)), first=True, last=True, stays=False, memory=share,
        hidden=0, tokens=0,
    )  # fmt: skip
    single = PipelineRank(
        ranks=1, apart=1, stages=[whole], passes=passes, idle=0.0, microbatches=microbatches
    )
    return share.pipeline(microbatches) or [single]


def stage_profiles(profile: Profile, rank: PipelineRank) -> list[Profile]:
    """Profiles of a rank's stages."""
    return [profile.stage(one.blocks, first=one.first, last=one.last) for one in rank.stages]


@dataclass
class _State:
    """A stage between its passes. first: no gradient is waiting; whole: its units are gathered;
    over: its gradients are reduced. waiting: what micro-batches between forward and backward keep,
    by micro-batch."""

    first: bool = True
    whole: bool = False
    over: bool = False
    waiting: dict[int, Kept] = field(default_factory=dict)


class StepWalk:
    """Everything that a rank holds in a step of micro-batches of `samples` samples. averaged: bytes
    of averages of each element that it updates."""

    def __init__(
        self, profile: Profile, rank: PipelineRank, averaged: int, *, samples: int
    ) -> None:
        self._rank, self._averaged, self._samples = rank, averaged, samples
        self._profiles = stage_profiles(profile, rank)
        self._kept = [self._after_forward(one) for one in self._profiles]
        self._known: dict[tuple[Kind, int, bool, bool, bool], list[list[Item]]] = {}
        self._states = [_State() for _ in rank.stages]

    def moments(self) -> Iterator[tuple[str, list[Item]]]:
        """Each fullest moment's phase, and everything that is held then."""
        yield LOAD, self._all(Moment("load"))
        count = self._samples * self._rank.microbatches
        passing = [  # buffers that stay from one step to the next
            Item(PASSED, "device", (one.hidden * one.received + one.tokens) * count)
            for one in self._rank.stages
        ]
        for one in self._rank.passes:
            state = self._states[one.stage]
            key = one.kind, one.stage, state.first, one.last or one.kind == "reduce", state.whole
            if key not in self._known:
                self._known[key] = _fullest([*self._pass(*key)])
            others = [*self._others(one), *passing]
            for items in self._known[key]:
                yield FORWARD if one.kind == "forward" else BACKWARD, [*items, *others]
            self._move(one)
        yield UPDATE, [*self._all(Moment("step")), *passing]
        for phase in (UPDATE, SAVE, RESUME):
            yield phase, [*self._all(Moment("between")), *passing]

    def _held(self, memory: StrategyMemory, moment: Moment) -> Iterator[Item]:
        """Items of a stage's strategy, and the averages of the weights that the rank updates."""
        yield from memory.held(moment)
        if moment.event != "load":
            elements, place = memory.masters
            yield Item(AVERAGE, place, self._averaged * elements)

    def _all(self, moment: Moment) -> list[Item]:
        return [item for one in self._rank.stages for item in self._held(one.memory, moment)]

    def _others(self, running: Pass) -> Iterator[Item]:
        """Items of the stages that do not run, and of the micro-batches that do not."""
        for number, (stage, state) in enumerate(zip(self._rank.stages, self._states, strict=True)):
            for batch, kept in state.waiting.items():
                own = (number, batch) == (running.stage, running.microbatch)
                if not (own and running.kind in ENDING):
                    yield from _items(kept)
            if number != running.stage:
                moment = Moment("rest", "head", state.first, state.over, state.whole)
                yield from self._held(stage.memory, moment)

    def _move(self, done: Pass) -> None:
        """Update the stage's state after a pass."""
        state, kind, number = self._states[done.stage], done.kind, done.stage
        if kind == "forward":
            state.waiting[done.microbatch] = self._kept[number]
            state.whole = self._rank.stages[number].stays
            return
        if kind in ("backward", "weights"):
            state.waiting.pop(done.microbatch, None)
        elif kind == "inputs":
            kept = self._after_inputs(number)
            kept[DEFERRED] += self._profiles[number].total("deferred").at(self._samples)
            state.waiting[done.microbatch] = kept
        state.whole = kind not in ("reduce", "release")
        state.over = state.over or kind == "reduce"
        state.first = state.first and kind in ("gather", "release", "inputs")

    def _pass(
        self, kind: Kind, number: int, first: bool, last: bool, whole: bool
    ) -> Iterator[list[Item]]:
        """Items of the running stage and of its micro-batch at each moment of a pass."""
        memory, profile = self._rank.stages[number].memory, self._profiles[number]
        kept = Kept(self._kept[number] if kind in ("backward", "inputs") else {})
        if kind == "weights":
            kept = self._after_inputs(number)
        for event, unit in _events(kind, self._rank.stages[number]):
            if event == "reduce":  # the head's backward is over
                kept[KEPT] += kept.pop(LOGITS, 0)
            moment, part = Moment(event, unit, first, last, whole), profile.part(event, unit)
            items = [*self._held(memory, moment), *_items(kept)]
            left = memory.gradients(moment) if event == "backward" else Gradients(0, 0)
            for peak in part.peaks or (Peak(ZERO),):
                yield [*items, *self._inside(peak, left, at_head=unit == "head")]
            if kind != "inputs" or unit == "head":  # the weights' half needs the rest
                self._count(kept, part, unit)
            if kind == "inputs":
                kept[DEFERRED] += part.deferred.at(self._samples)

    def _inside(self, peak: Peak, left: Gradients, *, at_head: bool) -> Iterator[Item]:
        """Further items at a peak inside a part."""
        size = peak.bytes.at(self._samples)
        yield Item(LOGITS if at_head else COMPUTED, "device", max(size, 0))
        # Memory freed meanwhile is part of what was kept.
        yield Item(LOGITS if at_head else KEPT, "device", min(size, 0))
        unreduced = left.kept * peak.arrived + left.passing * peak.newest
        yield Item(WHOLE_GRADIENTS, "device", round(unreduced))

    def _count(self, kept: Kept, part: Part, unit: Unit) -> None:
        """Add what a part of the model keeps, or frees."""
        kept[LOGITS if unit == "head" else KEPT] += part.kept.at(self._samples)
        kept[OFFLOADED] += part.offloaded.at(self._samples)

    def _after_forward(self, profile: Profile) -> Kept:
        """Bytes that a micro-batch keeps from forward to backward."""
        kept = Kept()
        units: list[Unit] = ["embeddings", *range(len(profile.model.blocks)), "head"]
        for unit in units:
            for event in ("forward", "loss"):
                self._count(kept, profile.part(event, unit), unit)
        return kept

    def _after_inputs(self, number: int) -> Kept:
        """Bytes that a micro-batch keeps for the weights' half of backward: all but the loss."""
        return Kept({name: size for name, size in self._kept[number].items() if name != LOGITS})


def _events(kind: Kind, stage: PipelineStage) -> Iterator[tuple[Event, Unit]]:
    """Events of a pass, in order."""
    units: list[Unit] = ["embeddings", *range(len(stage.blocks))]
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
        for unit in reversed(units):
            for event in IN_BACKWARD:
                if event != "regather" or isinstance(unit, int):
                    yield event, unit
    elif kind == "reduce":
        yield from (("reduce", unit) for unit in units)
    elif kind == "gather":
        yield "regather", "head"
    elif kind == "weights":
        yield "weights", "head"


def _items(kept: Kept) -> list[Item]:
    return [Item(name, "host" if name == OFFLOADED else "device", n) for name, n in kept.items()]


def _within(items: Sequence[Item], place: str) -> Iterator[Item]:
    return (one for one in items if one.where in PLACES[place])


def _bytes(items: Sequence[Item], place: str) -> int:
    return sum(one.bytes for one in _within(items, place))


def _fullest(moments: list[list[Item]]) -> list[list[Item]]:
    """The first moments that hold the most in one of the places, in order."""
    numbers = range(len(moments))
    best = {max(numbers, key=lambda n: _bytes(moments[n], place)) for place in PLACES if moments}
    return [moments[number] for number in sorted(best)]
