"""What a walk over a step adds up: forecasts of strategies (what a rank holds at each moment, sends
and copies), and profiles of models: memory and work of their parts on one rank, from a run on
tensors without memory. Parts are everything before the first block, a block of each kind, the head,
and the loss, each in forward and in backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from pipeline.planning.shapes import ModelShape

LOAD, FORWARD, BACKWARD = "load", "forward and loss", "backward"
UPDATE, SAVE, RESUME, EXPORT = "optimizer step", "checkpoint", "resume", "export"
LOADED = (FORWARD, BACKWARD, UPDATE, SAVE, RESUME)
"""Phases from when the model is loaded to the end of the training."""

PARAMETERS, GATHERED = "parameters", "parameters in use"
GRADIENTS, WHOLE_GRADIENTS = "gradients", "gradients before they are reduced"
OPTIMIZER, UPDATE_TEMPORARIES = "optimizer state", "temporaries of the update"
BUFFERS = "communication buffers"

Place = Literal["device", "host", "disk"]
"""Memory of the accelerator, memory of its host, or files of offloaded state."""
Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]
Unit = int | Literal["embeddings", "head"]
"""A block's number, or a part of the root: what runs before the first block or after the last."""
Event = Literal["load", "gather", "forward", "loss", "begin", "backward", "reduce", "weights",
                "rest", "step", "between"]  # fmt: skip
"""Events of a step: `gather` when forward comes to a unit, `forward` and `backward` while it
computes, `begin` in backward before any unit, `reduce` when a unit's gradients are all there,
`between` two steps. Of a pipeline only: `weights` when all gradients of a stage are there, at the
end of the weights' half of backward, and `rest` while another stage runs on the same rank."""
IN_BACKWARD: tuple[Event, ...] = ("backward", "reduce")
"""Events that come to a unit in backward."""


@dataclass(frozen=True)
class Extra:
    """Bytes that a stage needs next to the step: memory of one host in some phases, or files."""

    what: str
    bytes: int
    phases: Sequence[str] = ()


class Moment(NamedTuple):
    """A moment of a step, in its first or last micro-batch, or in one between. In a pipeline
    `first` says that no gradient of the stage is waiting, `last` that all are reduced."""

    event: Event
    unit: Unit = "head"
    first: bool = True
    last: bool = True


class Item(NamedTuple):
    name: str
    where: Place
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes that one place holds at a time, in total and by item; no item is empty."""

    bytes: int
    items: Mapping[str, int]

    @classmethod
    def of(cls, items: Mapping[str, int]) -> Held:
        held = {item: size for item, size in items.items() if size}
        return cls(bytes=sum(held.values()), items=held)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of whole tensors (as a rank has them after an all-gather) in all calls of a collective
    in an optimizer step, among `ranks` ranks whose numbers are `apart` from each other. A `send`
    goes to the next of them. `waits`: whether computation waits for each call."""

    collective: Collective
    bytes: int
    ranks: int
    apart: int = 1
    what: str
    waits: bool = False


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Bytes that one rank moves in a step: up from the host, down again, to and from a disk."""

    up: int = 0
    down: int = 0
    disk: int = 0


Kind = Literal["forward", "backward", "inputs", "weights", "reduce"]
"""Kinds of passes: forward, backward or its halves, and the reduction of a stage's gradients."""


class Pass(NamedTuple):
    """A micro-batch in one of a rank's stages. last: as in `Moment`, without a pipeline."""

    kind: Kind
    stage: int
    microbatch: int = 0
    last: bool = False


@dataclass(frozen=True, kw_only=True)
class PipelineStage:
    """Consecutive blocks on a rank, with the embeddings before the first block and the head after
    the last, and what the strategy holds of them. hidden, tokens: bytes for each sample of a
    micro-batch of hidden states, and of its tokens. deferred: bytes of gradients for each sample
    that a backward in two halves keeps for the half of weights."""

    blocks: range
    first: bool = True
    last: bool = True
    memory: StrategyMemory
    hidden: int = 0
    tokens: int = 0
    deferred: int = 0

    @property
    def received(self) -> int:
        """Tensors that are received for a micro-batch; as many are sent."""
        return (not self.first) + (not self.last)


@dataclass(frozen=True, kw_only=True)
class PipelineRank:
    """One of `ranks` ranks of a pipeline, whose numbers are `apart` from each other: its stages,
    and its passes in order. idle: share of a step in which it has nothing to do. microbatches: the
    schedule's, which may be more than there are with samples."""

    ranks: int = 1
    apart: int = 1
    stages: Sequence[PipelineStage]
    passes: Sequence[Pass]
    idle: float = 0.0
    microbatches: int


class StrategyMemory(ABC):
    """A strategy's share of a training, forecast by the wrap stage's planner. ranks: data-parallel
    ones. caveats: effects that the forecast leaves out, as sentences that continue "not counted:".
    averaged: bytes of averages of each trained element, which are saved with the moments. masters:
    elements of the trained weights that this rank updates, and their place. updated: bytes that an
    update reads and writes in the device's memory."""

    ranks: int
    caveats: tuple[str, ...] = ()
    averaged: int = 0
    masters: tuple[int, Place]
    updated: int

    @abstractmethod
    def held(self, moment: Moment) -> Iterator[Item]:
        """Everything held at a moment but activations and what `gradients` returns."""

    @abstractmethod
    def gradients(self, moment: Moment) -> tuple[int, int]:
        """Bytes for each element of a unit's weights that its gradient takes in backward, in
        addition to the gradient in the compute dtype that a profile counts while it is computed:
        from then until the unit's gradients are reduced, and only at its computation."""

    @abstractmethod
    def traffic(self, microbatches: int) -> Iterator[Traffic]:
        """Collectives of an optimizer step, without those inside of the model."""

    def pipeline(self, microbatches: int) -> Sequence[PipelineRank]:
        """The ranks of a pipeline; none where `held` is what every rank holds."""
        return ()

    def copies(self, microbatches: int) -> Copies:
        return Copies()


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
