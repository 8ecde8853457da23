"""The memory of a training step on one rank: a model's profile and a strategy's share together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pipeline.planning.profile import Part, Profile
from pipeline.planning.strategy import Event, Gradients, Item, Moment, StrategyMemory, Unit
from pipeline.planning.timeline import (
    BACKWARD,
    FORWARD,
    LOAD,
    RESUME,
    SAVE,
    UPDATE,
    Held,
    Place,
)

KEPT, COMPUTED, LOGITS = "activations for backward", "being computed", "logits and loss"
AVERAGE = "average of weights"
OFFLOADED, ARRIVED = "offloaded activations", "gradients before they are reduced"
PASSES = ((True, True),), ((True, False), (False, True))
"""Of a step of one micro-batch, and of several: whether no gradients are there, whether it is the
last. What is between the first and the last needs no more than these."""


@dataclass(kw_only=True)
class Peaks:
    """The fullest moment of each phase, of each place and of device and host together."""

    formulas: dict[str, str] = field(default_factory=dict)
    _tops: dict[tuple[str, str], tuple[int, dict[str, int]]] = field(default_factory=dict)

    def note(self, phase: str, items: Iterable[Item]) -> None:
        """What is held at a moment."""
        held: dict[str, dict[str, int]] = {"device": {}, "host": {}, "disk": {}, "both": {}}
        for item in items:
            if item.bytes:
                self.formulas.setdefault(item.name, item.formula)
                for place in (item.where, *(["both"] if item.where != "disk" else [])):
                    held[place][item.name] = held[place].get(item.name, 0) + item.bytes
        for place, sizes in held.items():
            total = sum(sizes.values())
            if total > self._tops.get((phase, place), (-1, {}))[0]:
                self._tops[phase, place] = total, sizes

    def of(self, place: Place, *, both: bool = False) -> dict[str, Held]:
        """Phase -> what a place holds at most, `both`: with the host's memory as one."""
        wanted = "both" if both else place
        return {
            phase: Held.of(items)
            for (phase, where), (_, items) in self._tops.items()
            if where == wanted
        }


def step_peaks(
    profile: Profile, strategy: StrategyMemory, *, samples: int, microbatches: int
) -> Peaks:
    """What loading, a step, saving and resuming take, with micro-batches of so many samples."""
    peaks = Peaks()
    peaks.note(LOAD, _held(strategy, Moment("load")))
    for first, last in PASSES[min(microbatches, 2) - 1]:
        _Walk(profile, strategy, samples, peaks, first=first, last=last).run()
    peaks.note(UPDATE, _held(strategy, Moment("step")))
    for phase in (UPDATE, SAVE, RESUME):
        peaks.note(phase, _held(strategy, Moment("between")))
    return peaks


def _held(strategy: StrategyMemory, moment: Moment) -> Iterator[Item]:
    """What a strategy holds at a moment, and averages of the weights that a rank updates."""
    yield from strategy.held(moment)
    if moment.event != "load":
        elements, place = strategy.masters
        size = strategy.averaged
        yield Item(AVERAGE, place, size * elements, f"{size} bytes x trained of this rank")


class _Walk:
    """One micro-batch, part by part."""

    def __init__(
        self,
        profile: Profile,
        strategy: StrategyMemory,
        samples: int,
        peaks: Peaks,
        *,
        first: bool,
        last: bool,
    ) -> None:
        self._profile = profile
        self._strategy = strategy
        self._samples = samples
        self._peaks = peaks
        self._passing = {"first": first, "last": last}
        self._kept = self._logits = self._host = 0
        self._phase = FORWARD

    def run(self) -> None:
        profile = self._profile
        blocks = profile.model.blocks
        self._enter("gather", "embeddings")
        self._compute("forward", "embeddings", profile.start)
        for place, kind in enumerate(blocks):
            self._enter("gather", place)
            self._compute("forward", place, profile.blocks[kind])
        self._enter("gather", "head")
        before = self._kept
        self._compute("forward", "head", profile.head, logits=True)
        self._compute("loss", "head", profile.loss, logits=True)
        self._logits = self._kept - before
        self._phase = BACKWARD
        self._compute("begin", "head", profile.loss_back, logits=True)
        self._compute("backward", "head", profile.head_back, logits=True)
        self._logits = 0
        self._enter("reduce", "head")
        for place in reversed(range(len(blocks))):
            self._enter("regather", place)
            self._compute("backward", place, profile.blocks_back[blocks[place]])
            self._enter("reduce", place)
        self._compute("backward", "embeddings", profile.start_back)
        self._enter("reduce", "embeddings")

    def _moment(self, event: Event, unit: Unit) -> Moment:
        return Moment(event, unit, **self._passing)

    def _enter(self, event: Event, unit: Unit) -> None:
        """Between two parts."""
        items = _held(self._strategy, self._moment(event, unit))
        self._peaks.note(self._phase, [*items, *self._activations(0, "")])

    def _compute(self, event: Event, unit: Unit, part: Part, *, logits: bool = False) -> None:
        moment = self._moment(event, unit)
        items = [*_held(self._strategy, moment)]
        left = self._strategy.gradients(moment) if event == "backward" else Gradients(0, 0)
        what = LOGITS if logits else COMPUTED
        for peak in part.peaks:
            own = left.kept * peak.arrived + left.passing * peak.newest
            more = [Item(ARRIVED, "device", own, "of a unit in backward")]
            size = peak.bytes.at(self._samples)
            self._peaks.note(self._phase, [*items, *more, *self._activations(size, what)])
        self._kept += part.kept.at(self._samples)
        self._host += part.offloaded.at(self._samples)

    def _activations(self, size: int, what: str) -> Iterator[Item]:
        kept = self._kept - self._logits + min(size, 0)
        yield Item(KEPT, "device", kept, "what blocks keep for backward")
        yield Item(LOGITS, "device", self._logits, "from the last block to the loss")
        yield Item(what, "device", max(size, 0), "the fullest moment inside a part")
        yield Item(OFFLOADED, "host", self._host, "inputs of blocks that are computed again")
