"""Memory of a training by its own engine, run on tensors without memory: a trace.

Models are run with only some of their blocks, twice, and every moment of a step is extrapolated to
the real number: memory grows by the same amount with each block, or with each period of blocks
where kinds of them alternate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.planning.strategy import StrategyMemory
from pipeline.planning.timeline import Held
from pipeline.planning.trace.meter import Moment
from pipeline.planning.trace.run import Job, Traced, declared, run
from pipeline.planning.trace.structure import depths, structure
from pipeline.planning.watch import Extent

CPU_KERNELS = (
    "kernels of GPUs that keep or take other tensors than those of CPUs, which were traced"
)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a trace found."""

    peaks: Mapping[str, Held]
    """Phase -> what the fullest moment holds."""
    how: str
    """How much of the model was run, for people."""


def trace(job: Job, strategy: StrategyMemory) -> Trace:
    """The memory of two steps of rank 0. Raises UsageError for a strategy or training that cannot
    be traced, and StageError for a model that needs values."""
    job.trains(bare=False)
    built = structure(declared(job))
    pair = depths(built.signatures, strategy.reach)
    found = [run(job, extent=Extent(blocks=depth)) for depth in pair or (None,)]
    if pair and [len(one.built.blocks) for one in found] != list(pair):
        found = [run(job)]
    numbers = " and ".join(str(len(one.built.blocks)) for one in found)
    return Trace(
        peaks=highest(_moments(found, len(built.blocks))),
        how=f"model and strategy were traced, with {numbers} of {len(built.blocks)} blocks",
    )


def _moments(found: Sequence[Traced], blocks: int) -> Iterator[tuple[str, Held]]:
    if len(found) == 1:
        for (phase, _, _), held in found[0].moments.items():
            yield phase, held
        return
    shallow, deeper = found
    low, high = len(shallow.built.blocks), len(deeper.built.blocks)
    for moment, held in shallow.moments.items():
        other = deeper.moments[_same(moment, low, high)]
        yield moment[0], _line(held, other, (blocks - low) / (high - low))


def _same(moment: Moment, shallow: int, deeper: int) -> Moment:
    """The moment of the deeper model that is the shallow one's, from the nearer end. Blocks are
    taken from both ends: what is between them lies on a straight line, so nowhere higher."""
    phase, visit, unit = moment
    if isinstance(unit, int) and unit >= shallow // 2:
        return phase, visit, unit + deeper - shallow
    return moment


def _line(low: Held, high: Held, along: float) -> Held:
    return Held.of(
        {
            item: round(
                low.items.get(item, 0) + along * (high.items.get(item, 0) - low.items.get(item, 0))
            )
            for item in {**low.items, **high.items}
        }
    )


def highest(peaks: Iterator[tuple[str, Held]]) -> dict[str, Held]:
    """The fullest of each phase."""
    found: dict[str, Held] = {}
    for phase, held in peaks:
        if phase not in found or held.bytes > found[phase].bytes:
            found[phase] = held
    return found
