"""Forecasts of strategies: what a rank holds at each moment of a step, sends and copies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

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
