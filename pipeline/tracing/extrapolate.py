"""From a model of two depths to one of any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeline.forecast.ledger import Peak
from pipeline.tracing.meter import Moment


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What was metered of a model of some depth."""

    blocks: int
    moments: Mapping[Moment, Peak]


def extrapolated(shallow: Trace, deeper: Trace, blocks: int) -> Iterator[tuple[str, Peak]]:
    """Phase and peak of every moment of a model of so many blocks that may be the highest.

    Blocks are taken from both ends, half of the shallow ones each: what is between them lies on a
    straight line between theirs, so it is nowhere higher.
    """
    for moment, low in shallow.moments.items():
        high = deeper.moments[_same(moment, shallow.blocks, deeper.blocks)]
        yield (
            moment[0],
            _line(low, high, (blocks - shallow.blocks) / (deeper.blocks - shallow.blocks)),
        )


def _same(moment: Moment, shallow: int, deeper: int) -> Moment:
    """The moment of the deeper model that is the shallow one's, from the nearer end."""
    phase, visit, unit = moment
    if isinstance(unit, int) and unit >= shallow // 2:
        return phase, visit, unit + deeper - shallow
    return moment


def _line(low: Peak, high: Peak, along: float) -> Peak:
    items = {
        item: round(
            low.items.get(item, 0) + along * (high.items.get(item, 0) - low.items.get(item, 0))
        )
        for item in {**low.items, **high.items}
    }
    return Peak(bytes=sum(items.values()), items=items)


def highest(peaks: Iterator[tuple[str, Peak]]) -> dict[str, Peak]:
    """Of each phase."""
    found: dict[str, Peak] = {}
    for phase, peak in peaks:
        if phase not in found or peak.bytes > found[phase].bytes:
            found[phase] = peak
    return found
