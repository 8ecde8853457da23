"""Profiles: memory and work of a model's parts on one rank, from a run on tensors without memory.

Parts are everything before the first block, a block of each kind, the head, and the loss, each in
forward and in backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from pipeline.planning.forecast import Event, PipelineStage, Traffic, Unit
from pipeline.planning.shapes import ModelShape


@dataclass(frozen=True)
class Line:
    """An amount that grows by `each` with each sample of a micro-batch."""

    fixed: float
    each: float

    def at(self, samples: int) -> int:
        return round(self.fixed + self.each * samples)


ZERO = Line(0, 0)


@dataclass(frozen=True)
class Peak:
    """A candidate for the peak inside a part. bytes: of activations and temporaries, beyond those
    when the part began. arrived: elements of its weights whose gradients have been computed, which
    a strategy may keep. newest: elements of the weight whose gradient is computed then."""

    bytes: Line
    arrived: int = 0
    newest: int = 0


@dataclass(frozen=True, kw_only=True)
class Part:
    """Memory and work of a part of the model in one direction. kept, offloaded: bytes on the device
    and on the host at its end, beyond those at its beginning. products, attention, again:
    floating-point operations of matrix products, of attention between tokens that see each other,
    and of both when recomputed. made: bytes of all new tensors. exchanges: traffic among ranks that
    divide the model, with no bytes, and its bytes."""

    kept: Line = ZERO
    offloaded: Line = ZERO
    peaks: tuple[Peak, ...] = ()
    products: Line = ZERO
    attention: Line = ZERO
    again: Line = ZERO
    made: Line = ZERO
    exchanges: tuple[tuple[Traffic, Line], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model under a recipe's settings, at one length of samples. parts: event and unit (of a
    block, its kind) -> the part that runs then. recomputed: whether blocks of each kind run again
    in backward, and so use their weights twice."""

    model: ModelShape
    parts: Mapping[str, Part]
    recomputed: tuple[bool, ...]

    def part(self, event: Event, unit: Unit) -> Part:
        """The part that runs at an event of a unit, which may be empty."""
        where = self.model.blocks[unit] if isinstance(unit, int) else unit
        return self.parts.get(f"{event} {where}", Part())

    def counted(self) -> Iterator[tuple[str, Part, int]]:
        """Each part's event and occurrences in a micro-batch."""
        units = [*map(str, self.model.blocks), "embeddings", "head"]
        for name, part in self.parts.items():
            event, unit = name.split()
            yield event, part, units.count(unit)

    def total(self, field: str, event: str = "") -> Line:
        """The sum of a field over a whole micro-batch, or over all units at one event."""
        found = [
            (getattr(part, field), count)
            for when, part, count in self.counted()
            if event in ("", when)
        ]
        return Line(
            sum(line.fixed * count for line, count in found),
            sum(line.each * count for line, count in found),
        )

    def of_stage(self, stage: PipelineStage) -> Profile:
        """The profile of a stage of a pipeline, which has its blocks, and what comes before the
        first and after the last. Masks and rotary embeddings are made in each stage, and hidden
        states take the same memory wherever they come from."""
        ends = {"embeddings": stage.first, "head": stage.last}
        left = {name: p for name, p in self.parts.items() if ends.get(name.split()[1], True)}
        if not stage.first:
            kept = self.part("forward", "embeddings").kept
            left["forward embeddings"] = Part(kept=kept)
            left["backward embeddings"] = Part(kept=Line(-kept.fixed, -kept.each))
        model = replace(self.model, blocks=tuple(self.model.blocks[n] for n in stage.blocks))
        return replace(self, model=model, parts=left)


def fullest(peaks: Iterable[Peak]) -> tuple[Peak, ...]:
    """Drop each peak that another exceeds for any samples and any bytes kept for an element."""
    found: dict[tuple[float, ...], Peak] = {}
    sized = {(p.bytes.each, p.bytes.fixed + p.bytes.each, p.arrived, p.newest): p for p in peaks}
    for sizes in sorted(sized, reverse=True):
        if not any(all(a >= b for a, b in zip(o, sizes, strict=True)) for o in found):
            found[sizes] = sized[sizes]
    return tuple(found.values())
