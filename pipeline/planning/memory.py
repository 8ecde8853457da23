"""The memory of a training step on one rank: a model's profile and a strategy's share together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from pipeline.planning import strategy
from pipeline.planning.profile import ZERO, Peak, Profile
from pipeline.planning.strategy import Gradients, Held, Item, Moment, Place, StrategyMemory, Unit

KEPT, COMPUTED, LOGITS = "activations for backward", "being computed", "logits and loss"
AVERAGE = "average of weights"
OFFLOADED, ARRIVED = "offloaded activations", "gradients before they are reduced"
PASSES = ((True, True),), ((True, False), (False, True))
"""Micro-batches that tell of a step of one, and of one of several: whether no gradients are there,
whether it is the last. What is between the first and the last needs no more than these."""


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
    profile: Profile, share: StrategyMemory, *, samples: int, microbatches: int
) -> Peaks:
    """Peaks of loading, a step, saving and resuming, with micro-batches of so many samples."""
    peaks = Peaks()
    peaks.note(strategy.LOAD, _held(share, Moment("load")))
    for first, last in PASSES[min(microbatches, 2) - 1]:
        _note_pass(profile, share, samples, peaks, first=first, last=last)
    peaks.note(strategy.UPDATE, _held(share, Moment("step")))
    for phase in (strategy.UPDATE, strategy.SAVE, strategy.RESUME):
        peaks.note(phase, _held(share, Moment("between")))
    return peaks


def _held(share: StrategyMemory, moment: Moment) -> Iterator[Item]:
    """Items that a strategy holds at a moment, and averages of the weights that a rank updates."""
    yield from share.held(moment)
    if moment.event != "load":
        elements, place = share.masters
        size = share.averaged
        yield Item(AVERAGE, place, size * elements, f"{size} bytes x trained of this rank")


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


def _note_pass(
    profile: Profile, share: StrategyMemory, samples: int, peaks: Peaks, *, first: bool, last: bool
) -> None:
    """Note every moment of a micro-batch of so many samples."""
    kept = logits = host = 0
    for phase, moment in _moments(len(profile.model.blocks), first=first, last=last):
        part, at_head = profile.part(moment.event, moment.unit), moment.unit == "head"
        if moment.event == "reduce":  # the head is through
            kept, logits = kept + logits, 0
        items = [
            *_held(share, moment),
            Item(KEPT, "device", kept, "what blocks keep for backward"),
            Item(LOGITS, "device", logits, "from the last block to the loss"),
            Item(OFFLOADED, "host", host, "inputs of blocks that are computed again"),
        ]
        left = share.gradients(moment) if moment.event == "backward" else Gradients(0, 0)
        for peak in part.peaks or (Peak(ZERO),):
            peaks.note(phase, [*items, *_inside(peak, left, samples, at_head=at_head)])
        host += part.offloaded.at(samples)
        logits += part.kept.at(samples) * at_head
        kept += part.kept.at(samples) * (not at_head)


def _inside(peak: Peak, left: Gradients, samples: int, *, at_head: bool) -> Iterator[Item]:
    """Items that are held beside those in the midst of a part."""
    size = peak.bytes.at(samples)
    what = LOGITS if at_head else COMPUTED
    yield Item(what, "device", max(size, 0), "the fullest moment inside a part")
    # What is given back meanwhile is part of what was kept.
    yield Item(LOGITS if at_head else KEPT, "device", min(size, 0))
    unreduced = left.kept * peak.arrived + left.passing * peak.newest
    yield Item(ARRIVED, "device", unreduced, "of a unit in backward")
