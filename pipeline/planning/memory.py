"""The memory of a training step on one rank: a model's profile and a strategy's share together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from pipeline.planning.profile import Part, Peak, Profile
from pipeline.planning.strategy import (
    BACKWARD,
    FORWARD,
    LOAD,
    RESUME,
    SAVE,
    UPDATE,
    Event,
    Gradients,
    Held,
    Item,
    Moment,
    Place,
    StrategyMemory,
    Unit,
)

KEPT, COMPUTED, LOGITS = "activations for backward", "being computed", "logits and loss"
AVERAGE = "average of weights"
OFFLOADED, ARRIVED = "offloaded activations", "gradients before they are reduced"
PASSES = ((True, True),), ((True, False), (False, True))
"""Micro-batches that tell of a step of one, and of one of several: whether no gradients are there,
whether it is the last. What is between the first and the last needs no more than these."""
Happening = tuple[str, Event, Unit, Part | None]
"""Phase, event, and the part that runs; None between two parts."""


class Peaks:
    """The fullest moment of each phase, of each place and of device and host together."""

    def __init__(self) -> None:
        self.formulas: dict[str, str] = {}
        """Item -> how it comes about."""
        self._tops: dict[str, dict[str, Held]] = {}

    def note(self, phase: str, items: Iterable[Item]) -> None:
        """Note what is held at a moment."""
        held: dict[str, Counter[str]] = {"device": Counter(), "host": Counter(), "disk": Counter()}
        for item in items:
            held[item.where][item.name] += item.bytes
            if item.bytes:
                self.formulas.setdefault(item.name, item.formula)
        held["both"] = Counter(held["device"])
        held["both"].update(held["host"])
        for place, sizes in held.items():
            tops = self._tops.setdefault(place, {})
            if phase not in tops or sizes.total() > tops[phase].bytes:
                tops[phase] = Held.of(sizes)

    def of(self, place: Place, *, both: bool = False) -> dict[str, Held]:
        """Phase -> what a place holds at most, `both`: with the host's memory as one."""
        return self._tops["both" if both else place]


def step_peaks(
    profile: Profile, strategy: StrategyMemory, *, samples: int, microbatches: int
) -> Peaks:
    """Peaks of loading, a step, saving and resuming, with micro-batches of so many samples."""
    peaks = Peaks()
    peaks.note(LOAD, _held(strategy, Moment("load")))
    for first, last in PASSES[min(microbatches, 2) - 1]:
        _note_pass(profile, strategy, samples, peaks, first=first, last=last)
    peaks.note(UPDATE, _held(strategy, Moment("step")))
    for phase in (UPDATE, SAVE, RESUME):
        peaks.note(phase, _held(strategy, Moment("between")))
    return peaks


def _held(strategy: StrategyMemory, moment: Moment) -> Iterator[Item]:
    """Items that a strategy holds at a moment, and averages of the weights that a rank updates."""
    yield from strategy.held(moment)
    if moment.event != "load":
        elements, place = strategy.masters
        size = strategy.averaged
        yield Item(AVERAGE, place, size * elements, f"{size} bytes x trained of this rank")


def _happenings(profile: Profile) -> Iterator[Happening]:
    """A micro-batch, in order."""
    blocks = profile.model.blocks
    yield FORWARD, "gather", "embeddings", None
    yield FORWARD, "forward", "embeddings", profile.start
    for place, kind in enumerate(blocks):
        yield FORWARD, "gather", place, None
        yield FORWARD, "forward", place, profile.blocks[kind]
    yield FORWARD, "gather", "head", None
    yield FORWARD, "forward", "head", profile.head
    yield FORWARD, "loss", "head", profile.loss
    yield BACKWARD, "begin", "head", profile.loss_back
    yield BACKWARD, "backward", "head", profile.head_back
    yield BACKWARD, "reduce", "head", None
    for place, kind in reversed([*enumerate(blocks)]):
        yield BACKWARD, "regather", place, None
        yield BACKWARD, "backward", place, profile.blocks_back[kind]
        yield BACKWARD, "reduce", place, None
    yield BACKWARD, "backward", "embeddings", profile.start_back
    yield BACKWARD, "reduce", "embeddings", None


def _note_pass(
    profile: Profile,
    strategy: StrategyMemory,
    samples: int,
    peaks: Peaks,
    *,
    first: bool,
    last: bool,
) -> None:
    """Note every moment of a micro-batch of so many samples."""
    kept = logits = host = 0
    for phase, event, unit, part in _happenings(profile):
        moment = Moment(event, unit, first=first, last=last)
        if event == "reduce":  # the head is through
            kept, logits = kept + logits, 0
        items = [
            *_held(strategy, moment),
            Item(KEPT, "device", kept, "what blocks keep for backward"),
            Item(LOGITS, "device", logits, "from the last block to the loss"),
            Item(OFFLOADED, "host", host, "inputs of blocks that are computed again"),
        ]
        if part is None:
            peaks.note(phase, items)
            continue
        left = strategy.gradients(moment) if event == "backward" else Gradients(0, 0)
        for peak in part.peaks:
            peaks.note(phase, [*items, *_inside(peak, left, samples, at_head=unit == "head")])
        host += part.offloaded.at(samples)
        if unit == "head":
            logits += part.kept.at(samples)
        else:
            kept += part.kept.at(samples)


def _inside(peak: Peak, left: Gradients, samples: int, *, at_head: bool) -> Iterator[Item]:
    """Items that are held beside those in the midst of a part."""
    size = peak.bytes.at(samples)
    what = LOGITS if at_head else COMPUTED
    yield Item(what, "device", max(size, 0), "the fullest moment inside a part")
    # What is given back meanwhile is part of what was kept.
    yield Item(LOGITS if at_head else KEPT, "device", min(size, 0))
    unreduced = left.kept * peak.arrived + left.passing * peak.newest
    yield Item(ARRIVED, "device", unreduced, "of a unit in backward")
