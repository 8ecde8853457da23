"""What the parts of a model take on one rank: measured once without memory, then arithmetic.

A part is what runs between two marks: what comes before the first block, a block of each kind, the
head, the loss; each forward and backward. Bytes are functions of the samples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.planning.shapes import ModelShape, record, restored


@dataclass(frozen=True)
class Line:
    """An amount that grows with the samples of a micro-batch."""

    fixed: float
    each: float
    """More for each sample."""

    def at(self, samples: int) -> int:
        """The amount of so many samples."""
        return round(self.fixed + self.each * samples)

    def __add__(self, other: Line) -> Line:
        return Line(self.fixed + other.fixed, self.each + other.each)

    @classmethod
    def through(cls, first: tuple[int, float], second: tuple[int, float]) -> Line:
        """The line through two pairs of samples and amount."""
        slope = (second[1] - first[1]) / (second[0] - first[0])
        return cls(first[1] - slope * first[0], slope)


ZERO = Line(0, 0)


@dataclass(frozen=True)
class Peak:
    """A moment inside a part that may be its fullest."""

    bytes: Line
    """Activations and temporaries, beyond what was there when the part began."""
    arrived: int = 0
    """Elements of the part's weights whose gradients have come, which a strategy may keep."""
    newest: int = 0
    """Elements of the weight whose gradient comes at this moment."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a part of the model takes in one direction."""

    kept: Line = ZERO
    """Bytes of the device that are there when it ends, beyond those when it began."""
    offloaded: Line = ZERO
    """The same of the host, for activations that go there."""
    peaks: tuple[Peak, ...] = ()
    """Those that are the fullest for some number of samples, under some strategy."""
    products: Line = ZERO
    """Floating-point operations of matrix products, without what is computed again."""
    attention: Line = ZERO
    """The same of attention kernels; one that is causal counts only pairs of tokens that see each
    other."""
    again: Line = ZERO
    """The same of what is computed a second time."""
    made: Line = ZERO
    """Bytes of all tensors that are made."""


NOTHING = Part()


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model under a recipe's settings, at one length of samples. JSON."""

    model: ModelShape
    length: int
    """Tokens of a sample."""
    start: Part
    """What runs before the first block."""
    blocks: tuple[Part, ...]
    """Forward of each kind of block."""
    head: Part
    """What runs behind the last block, to what the model gives."""
    loss: Part
    loss_back: Part
    head_back: Part
    blocks_back: tuple[Part, ...]
    start_back: Part
    recomputed: tuple[bool, ...]
    """Which kinds of blocks run again in backward, and so use their weights twice."""

    def parts(self) -> Iterable[tuple[Part, int]]:
        """Every part, and how often it runs in a micro-batch."""
        counts = [self.model.blocks.count(kind) for kind in range(len(self.blocks))]
        yield from zip(self.blocks, counts, strict=True)
        yield from zip(self.blocks_back, counts, strict=True)
        for part in (self.start, self.head, self.loss):
            yield part, 1
        for part in (self.loss_back, self.head_back, self.start_back):
            yield part, 1

    def total(self, field: str) -> Line:
        """An amount of a whole micro-batch."""
        total = ZERO
        for part, count in self.parts():
            one: Line = getattr(part, field)
            total += Line(one.fixed * count, one.each * count)
        return total

    def record(self) -> dict[str, Any]:
        """JSON."""
        plain = {
            name: [*map(_part, value)] if isinstance(value, tuple) else _part(value)
            for name, value in vars(self).items()
            if name not in ("model", "length", "recomputed")
        }
        return plain | {
            "model": record(self.model),
            "length": self.length,
            "recomputed": list(self.recomputed),
        }

    @classmethod
    def restored(cls, content: Mapping[str, Any]) -> Profile:
        """What `record` has written. Raises TypeError, ValueError or KeyError for anything else."""
        parts = {
            name: tuple(map(_restored, value)) if name.startswith("blocks") else _restored(value)
            for name, value in content.items()
            if name not in ("model", "length", "recomputed")
        }
        return cls(
            model=restored(content["model"]),
            length=int(content["length"]),
            recomputed=tuple(map(bool, content["recomputed"])),
            **parts,  # type: ignore[arg-type]
        )


LINES = ("kept", "offloaded", "products", "attention", "again", "made")


def _part(part: Part) -> dict[str, Any]:
    lines = {name: _line(getattr(part, name)) for name in LINES}
    peaks = [[*_line(one.bytes), one.arrived, one.newest] for one in part.peaks]
    return lines | {"peaks": peaks}


def _line(line: Line) -> Sequence[float]:
    return line.fixed, line.each


def _restored(content: Mapping[str, Any]) -> Part:
    peaks = tuple(
        Peak(Line(fixed, each), arrived, newest)
        for fixed, each, arrived, newest in content["peaks"]
    )
    return Part(peaks=peaks, **{name: Line(*content[name]) for name in LINES})


def fullest(peaks: Iterable[Peak]) -> tuple[Peak, ...]:
    """Those of which no other one is at least as full for every number of samples from one on and
    at any bytes that a strategy keeps for an element."""
    found: list[Peak] = []
    for peak in sorted(peaks, key=_fullness, reverse=True):
        if not any(_covers(other, peak) for other in found):
            found.append(peak)
    return tuple(found)


def _fullness(peak: Peak) -> tuple[float, ...]:
    return peak.bytes.each, peak.bytes.fixed, peak.arrived, peak.newest


def _covers(one: Peak, other: Peak) -> bool:
    return (
        one.bytes.each >= other.bytes.each
        and one.bytes.fixed + one.bytes.each >= other.bytes.fixed + other.bytes.each
        and one.arrived >= other.arrived
        and one.newest >= other.newest
    )
