"""What stages tell of themselves for a forecast: sizes, and no tensor."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self

if TYPE_CHECKING:
    from pipeline.forecast.net import Net
    from pipeline.forecast.tape import Value

Taken = Literal["nothing", "one", "two", "all"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Weight:
    """A parameter. Tied ones are one object."""

    name: str
    """As the model's module calls it."""
    shape: tuple[int, ...]
    trained: bool = True
    borrowed: bool = False
    """Held in the compute dtype (`ModelSource.borrowed`)."""
    packed: int | None = None
    """Bytes that it is held in, flat, whatever its dtype would take; None: as numbers."""
    update: Update | None = None
    """What is trained beside it, if it is a matrix."""
    transposed: bool = False
    """Whether a matrix has the shape (inputs, outputs) instead of (outputs, inputs)."""

    @functools.cached_property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def outputs(self) -> int:
        """Numbers that a matrix gives for each row."""
        return self.shape[1] if self.transposed else self.shape[0]

    def bytes(self, size: int) -> int:
        """Bytes in which it is held, as numbers of `size` bytes where it is numbers."""
        return self.elements * size if self.packed is None else self.packed

    def shard(self, shards: int, size: int) -> int:
        """Bytes of the first of so many shards by rows, which is the largest."""
        if self.packed is not None:
            return -(-self.packed // (shards * size)) * size
        return -(-self.shape[0] // shards) * (self.elements // self.shape[0]) * size

    @functools.cached_property
    def parts(self) -> tuple[Weight, ...]:
        """The weight and its update, in module order."""
        return (self,) if self.update is None else (self, self.update.down, self.update.up)


@dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """A low-rank update of a matrix (Hu et al. 2021, LoRA)."""

    down: Weight
    """Shape (rank, inputs)."""
    up: Weight
    """Shape (outputs, rank)."""
    dropout: bool = False


class BlockShape(ABC):
    """A transformer block."""

    @property
    @abstractmethod
    def own(self) -> Sequence[Weight]:
        """Its weights, in module order, without updates."""

    @property
    def window(self) -> int | None:
        """How many tokens a token sees at most, itself counted; None: all before it."""
        return None

    @functools.cached_property
    def weights(self) -> Sequence[Weight]:
        """Its weights and their updates, in module order."""
        return tuple(part for weight in self.own for part in weight.parts)

    @abstractmethod
    def changed(self, change: Callable[[Weight], Weight]) -> Self:
        """The same block with every own weight replaced."""

    @abstractmethod
    def forward(self, net: Net, x: Value) -> Value:
        """Tell `net` what is computed of the residual stream `x`; gives the next one. The caller
        keeps its reference to `x`."""


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """Activation checkpointing."""

    every: int = 1
    keep: Literal["nothing", "attention", "matmuls"] = "nothing"
    offload: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelShape(ABC):
    """A language model."""

    kind: str
    """Its `model_type`."""
    hidden: int
    """Width of the residual stream."""
    vocabulary: int
    """Rows of the head."""
    root: Sequence[Weight]
    """What belongs to no block, in module order, tied ones once."""
    blocks: Sequence[BlockShape]
    attention: int
    """Heads times head size: what a token costs per token that it attends to."""
    recomputed: Recomputed | None = None
    context: int | None = None
    """Tokens of a sample that it is made for; None: its config does not say."""
    caveats: Sequence[str] = field(default_factory=tuple)
    """What this arithmetic leaves out of account."""

    def weights(self) -> Iterator[Weight]:
        """All of them, in module order by unit: the root's, then those of each block."""
        yield from self.root
        for block in self.blocks:
            yield from block.weights

    @abstractmethod
    def changed(self, change: Callable[[Weight], Weight]) -> Self:
        """The same model with every own weight replaced; tied ones stay one."""

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return sum(weight.elements for weight in self.weights())

    @property
    def trained(self) -> int:
        """Elements of the trained weights."""
        return sum(weight.elements for weight in self.weights() if weight.trained)

    @property
    @abstractmethod
    def output(self) -> Weight:
        """The head's matrix, shape (vocabulary, hidden)."""

    @property
    def tied(self) -> Weight | None:
        """The embedding, if it is the head as well. Autograd adds its two gradients to each other
        before it adds them to what there is."""
        return self.output if self.output is self.root[0] else None

    @property
    def changes_logits(self) -> bool:
        """Whether it computes something with what its head gives."""
        return False

    def finished(self, net: Net, logits: Value) -> Value:
        """What it computes with what its head gives, to which it takes the reference."""
        return logits

    @abstractmethod
    def forward(
        self, net: Net, through: Callable[[Value], Value], loss: Callable[[Value], Value]
    ) -> Value:
        """What is computed from tokens to the loss. `through` runs all blocks, `loss` the head and
        what follows; each takes the reference to what it is given."""


@dataclass(frozen=True, kw_only=True)
class SampleShape:
    """Samples of the data."""

    length: int
    """Tokens of the longest."""
    packed: bool = False
    """Whether several documents are in one, so that attention needs a mask."""


@dataclass(frozen=True, kw_only=True)
class OptimizerShape:
    """What an optimizer keeps, and takes while it updates."""

    algorithm: str
    """As `OptimizerPlan.algorithm`."""
    bits: float
    """Bits of all moments of an element, scales counted."""
    moments: int
    """How many numbers it keeps for each element."""
    taken: Taken = "nothing"
    """What an update takes for a moment, in the master dtype: nothing, as much as the largest
    parameter or twice that, or as much as all that it updates."""

    def state(self, elements: int) -> int:
        """Bytes of the moments of so many elements."""
        return round(elements * self.bits / 8)

    def touched(self, elements: int, size: int) -> int:
        """Bytes read and written to update so many weights of `size` bytes: weight and moments both
        ways, gradients, which are also read for the norm and clipped."""
        return elements * (2 * size + 4 * size) + 2 * self.state(elements)

    def update(self, counts: Sequence[int], size: int) -> int:
        """Bytes taken for a moment to update parameters of so many elements, `size` bytes each."""
        if not counts or self.taken == "nothing":
            return 0
        largest = max(counts) * (2 if self.taken == "two" else 1)
        return size * (sum(counts) if self.taken == "all" else largest)
