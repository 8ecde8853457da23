"""Trace a training: its memory by its own engine, run on tensors without memory.

Models are run with only some of their blocks, twice, and every position of a step is extrapolated
to the real number: memory grows by the same amount with each block, or with each period of blocks
where kinds of them alternate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.planning.planner import Extent, Job
from pipeline.planning.strategy import Held, StrategyMemory
from pipeline.planning.trace.run import declared, run, trainers
from pipeline.planning.trace.structure import depths, structure
from pipeline.planning.trace.tracker import Position, Stretch

TENSORS = "tensors, as traced"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Peaks that a trace found."""

    peaks: Mapping[str, Held]
    """Phase -> what the device holds at its peak."""
    how: str
    """How much of the model was run, for people."""


def trace(job: Job, strategy: StrategyMemory) -> Trace:
    """The memory of two steps of rank 0. Raises UsageError for a strategy or training that cannot
    be traced, and StageError for a model that needs values."""
    trainers(job)
    blocks = structure(declared(job).skeleton).signatures
    pair = depths(blocks, strategy.reach)
    found = [run(job, Extent(blocks=depth)) for depth in pair or (None,)]
    if pair and [len(one.built.names) for one in found] != list(pair):
        found = [run(job)]
    numbers = [len(one.built.names) for one in found]
    tops = [tops_of(one.stretches) for one in found]
    peaks = dict(_extrapolated(tops, numbers, len(blocks))) if len(found) > 1 else tops[0]
    shown = " and ".join(map(str, numbers))
    return Trace(
        peaks=by_phase(peaks),
        how=f"model and strategy were traced, with {shown} of {len(blocks)} blocks",
    )


def tops_of(stretches: Iterable[Stretch]) -> dict[Position, int]:
    """Position -> the most bytes of the device there."""
    found: dict[Position, int] = {}
    for one in stretches:
        most = max(level.device for level in one.levels)
        found[one.position] = max(most, found.get(one.position, 0))
    return found


def by_phase(tops: Mapping[Position, int]) -> dict[str, Held]:
    """Phase -> the most that the device holds in it."""
    found: dict[str, int] = {}
    for position, size in tops.items():
        found[position.phase] = max(size, found.get(position.phase, 0))
    return {phase: Held.of({TENSORS: size}) for phase, size in found.items()}


def _extrapolated(
    tops: Sequence[Mapping[Position, int]], depths: Sequence[int], blocks: int
) -> Iterator[tuple[Position, int]]:
    (shallow, deeper), (low, high) = tops, depths
    for position, size in shallow.items():
        more = deeper[_same(position, low, high)] - size
        yield position, size + round(more * (blocks - low) / (high - low))


def _same(position: Position, shallow: int, deeper: int) -> Position:
    """The position in the deeper model that is the shallow one's, from the nearer end. Blocks are
    taken from both ends: the blocks between them lie on a straight line, so none is higher."""
    part = position.part
    if isinstance(part, int) and part >= shallow // 2:
        return position._replace(part=part + deeper - shallow)
    return position
