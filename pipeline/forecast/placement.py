"""How a strategy holds a model: its part of the story of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipeline.forecast.ledger import Ledger, Place
from pipeline.forecast.tape import Tape, Value

if TYPE_CHECKING:
    from pipeline.forecast.shapes import Weight

PARAMETERS = "parameters"
GATHERED = "parameters in use"
GRADIENTS = "gradients"
WHOLE_GRADIENTS = "gradients before they are reduced"
OPTIMIZER = "optimizer state"
BUFFERS = "communication buffers"
UPDATE = "temporaries of the update"

Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "broadcast"]
Unit = int | None
"""Number of a block; None is the root, everything else."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one rank's collectives move in an optimizer step."""

    collective: Collective
    bytes: int
    """Of the whole tensors, over all calls: what each rank ends up with of an all-gather."""
    ranks: int
    """That take part in one."""
    apart: int = 1
    """How far their numbers are apart: 1 are neighbours."""
    what: str


@dataclass(frozen=True, kw_only=True)
class Copies:
    """What one rank moves between places in an optimizer step, in bytes."""

    up: int = 0
    """From the machine's memory to the accelerator."""
    down: int = 0
    """The other way."""
    disk: int = 0
    """Read and written."""

    def __add__(self, other: Copies) -> Copies:
        return Copies(
            up=self.up + other.up, down=self.down + other.down, disk=self.disk + other.disk
        )


class Placement(ABC):
    """Told what happens in a training step, it tells the ledger what that means for weights,
    gradients of weights, optimizer state and buffers. Activations are not its business."""

    ledger: Ledger
    ranks: int
    """Data-parallel ranks."""
    averaged: int = 0
    """Bytes of an average of each trained element, which is saved beside moments."""
    casts_inputs: bool = False
    """Whether a block is given copies of its inputs in the compute dtype."""

    @abstractmethod
    def load(self) -> None:
        """The model is built and filled; what it takes afterwards stays."""

    @property
    @abstractmethod
    def masters(self) -> tuple[int, Place]:
        """Elements of the trained weights that this rank updates, and where they are."""

    @property
    def reach(self) -> int:
        """For how many units ahead something may be held. A trace needs a model that is deeper by
        them, because the last units have none ahead."""
        return 1

    def begin(self, *, last: bool) -> None:
        """A micro-batch begins; `last` is that of an optimizer step."""

    @abstractmethod
    def use(self, tape: Tape, weight: Weight, size: int) -> Value:
        """The weight as a forward pass reads it, numbers of `size` bytes, with one reference."""

    def before_forward(self, unit: Unit) -> None:
        """A unit is about to run."""

    def after_forward(self, unit: Unit) -> None:
        """A unit has run."""

    def before_backward(self, unit: Unit) -> None:
        """Backward comes to a unit; to the root when it begins."""

    def backward_at_output(self) -> None:
        """Backward comes to what the model's forward method has given: the loss, or logits."""

    def after_backward(self, unit: Unit) -> None:
        """All gradients of a unit are there."""

    @abstractmethod
    def step(self) -> None:
        """Clip, update, drop the gradients."""

    @property
    @abstractmethod
    def updated(self) -> int:
        """Bytes that an update reads and writes in the device's memory."""

    @abstractmethod
    def traffic(self, microbatches: int) -> Iterator[Traffic]:
        """Of an optimizer step of so many micro-batches."""

    def copies(self, microbatches: int) -> Copies:
        """Of an optimizer step of so many micro-batches."""
        return Copies()
