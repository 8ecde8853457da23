"""A rank's memory at a moment of a step: its strategy's share, and activations by the profile."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.planning import forecast
from pipeline.planning.forecast import Gradients, Item, Moment, StrategyMemory
from pipeline.planning.profile import Peak

KEPT, COMPUTED, LOGITS = "activations for backward", "being computed", "logits and loss"
AVERAGE = "average of weights"
OFFLOADED = "offloaded activations"


def held(share: StrategyMemory, moment: Moment, averaged: int | None = None) -> Iterator[Item]:
    """A strategy's items at a moment, and the averages of the weights that a rank updates, of
    `averaged` bytes an element (None: as the strategy says)."""
    yield from share.held(moment)
    if moment.event != "load":
        elements, place = share.masters
        yield Item(AVERAGE, place, (share.averaged if averaged is None else averaged) * elements)


def inside(peak: Peak, left: Gradients, samples: int, *, at_head: bool) -> Iterator[Item]:
    """Further items at a peak inside a part."""
    size = peak.bytes.at(samples)
    yield Item(LOGITS if at_head else COMPUTED, "device", max(size, 0))
    # Memory freed meanwhile is part of what was kept.
    yield Item(LOGITS if at_head else KEPT, "device", min(size, 0))
    unreduced = left.kept * peak.arrived + left.passing * peak.newest
    yield Item(forecast.WHOLE_GRADIENTS, "device", round(unreduced))
