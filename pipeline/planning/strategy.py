"""How a strategy holds a model: bytes of weights, gradients and optimizer state at each moment of a
step, and what goes over which link."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

LOAD, FORWARD, BACKWARD = "load", "forward and loss", "backward"
UPDATE, SAVE, RESUME = "optimizer step", "checkpoint", "resume"
EXPORT = "export"
LOADED = (FORWARD, BACKWARD, UPDATE, SAVE, RESUME)
"""Phases from when the model is loaded to the end of the training."""

Place = Literal["device", "host", "disk"]
"""Memory of the accelerator, of its machine, or files of offloaded state."""
PARAMETERS = "parameters"
GATHERED = "parameters in use"
GRADIENTS = "gradients"
WHOLE_GRADIENTS = "gradients before they are reduced"
OPTIMIZER = "optimizer state"
BUFFERS = "communication buffers"
UPDATE_TEMPORARIES = "temporaries of the update"

Collective = Literal["all-reduce", "all-gather", "reduce-scatter"]
Unit = int | Literal["embeddings", "head"]
"""Number of a block; what runs before the first, and behind the last. The last two are the root's
parts."""
Event = Literal["load", "gather", "forward", "loss", "begin", "regather", "backward", "reduce",
                "step", "between"]  # fmt: skip
"""Events of a step: `gather` and `regather` when forward and backward come to a unit, `forward` and
`backward` while it computes, `begin` in backward before any unit, `reduce` when a unit's gradients
are all there; `between` two steps."""
IN_BACKWARD: tuple[Event, ...] = ("regather", "backward", "reduce")
"""Events that come to a unit in backward."""


class Moment(NamedTuple):
    """A moment of a step, in its first or last micro-batch, or in one between."""

    event: Event
    unit: Unit = "head"
    first: bool = True
    last: bool = True


class Item(NamedTuple):
    """Bytes that one rank holds."""

    name: str
    where: Place
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes that one place holds at a time."""

    bytes: int
    items: Mapping[str, int]
    """Item -> bytes, of those that are not zero."""

    @classmethod
    def of(cls, items: Mapping[str, int]) -> Held:
        """The sum of some items."""
        held = {item: size for item, size in items.items() if size}
        return cls(bytes=sum(held.values()), items=held)


class Gradients(NamedTuple):
    """Bytes for each element that a weight's gradient leaves behind in backward. Its own memory, in
    the compute dtype, is the model's."""

    kept: int
    """From when it is computed until the unit's are reduced."""
    passing: int
    """At the moment when it comes."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one rank's collectives move in an optimizer step, among ranks whose numbers are so
    far apart; over all calls, of whole tensors, as a rank has them after an all-gather."""

    collective: Collective
    bytes: int
    ranks: int
    apart: int = 1
    what: str


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Bytes that one rank moves in an optimizer step: from the machine's memory up to the
    accelerator, down again, and those that it reads and writes on a disk."""

    up: int = 0
    down: int = 0
    disk: int = 0


class StrategyMemory(ABC):
    """A strategy's share of a training, results by the wrap stage's planner."""

    ranks: int
    """Data-parallel ranks."""
    averaged: int = 0
    """Bytes of averages of each trained element, which are saved beside moments."""
    masters: tuple[int, Place]
    """Elements of the trained weights that this rank updates, and where they are."""
    updated: int
    """Bytes that an update reads and writes in the device's memory."""

    @abstractmethod
    def held(self, moment: Moment) -> Iterator[Item]:
        """Everything that is there at a moment but activations, and but the gradients of the unit
        that is in backward, of which `gradients` tells."""

    @abstractmethod
    def gradients(self, moment: Moment) -> Gradients:
        """Bytes that those gradients leave behind."""

    @abstractmethod
    def traffic(self, microbatches: int) -> Iterator[Traffic]:
        """Collectives of an optimizer step of so many micro-batches."""

    def copies(self, microbatches: int) -> Copies:
        """Copies between places in an optimizer step of so many micro-batches."""
        return Copies()
