"""Forecasts that planners hand to each other: sizes of the model, of samples, steps and the
optimizer, and the memory of a strategy at each moment of a step. Nothing here makes a tensor."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pipeline.contracts.precision import Precision
from pipeline.contracts.training import TrainingLength

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number in a recipe's dtypes."""

LOAD, FORWARD, BACKWARD = "load", "forward and loss", "backward"
UPDATE, SAVE, RESUME = "optimizer step", "checkpoint", "resume"
EXPORT = "export"
LOADED = (FORWARD, BACKWARD, UPDATE, SAVE, RESUME)
"""Phases from when the model is loaded to the end of the training."""

PARAMETERS = "parameters"
GATHERED = "parameters in use"
GRADIENTS = "gradients"
WHOLE_GRADIENTS = "gradients before they are reduced"
OPTIMIZER = "optimizer state"
BUFFERS = "communication buffers"
UPDATE_TEMPORARIES = "temporaries of the update"

Place = Literal["device", "host", "disk"]
"""Memory of the accelerator, memory of its host, or files of offloaded state."""
Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]
Unit = int | Literal["embeddings", "head"]
"""A block's number, or a part of the root: what runs before the first block or after the last."""
Event = Literal["load", "gather", "forward", "loss", "begin", "regather", "backward", "reduce",
                "rest", "step", "between"]  # fmt: skip
"""Events of a step: `gather` and `regather` when forward and backward come to a unit, `forward` and
`backward` while it computes, `begin` in backward before any unit, `reduce` when a unit's gradients
are all there, `rest` while another stage of a pipeline runs on the same rank; `between` two
steps."""
IN_BACKWARD: tuple[Event, ...] = ("regather", "backward", "reduce")
"""Events that come to a unit in backward."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter, under its name in the model's module; tied parameters are one. A `frozen_base`
    weight (`ModelSource.frozen_base`) is held in the compute dtype; elements of a `packed` one are
    bytes, as in weights of 4 bits.

    shape: of the part that one rank computes with. whole: of the model's weight, if ranks divide
    it. experts: number of ranks that have different experts of it, by which it is sharded less.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool = True
    frozen_base: bool = False
    packed: bool = False
    whole: tuple[int, ...] | None = None
    experts: int = 1

    @functools.cached_property
    def elements(self) -> int:
        """Number of elements of the part."""
        return math.prod(self.shape)

    @functools.cached_property
    def all_elements(self) -> int:
        """Number of elements of the model's weight."""
        return math.prod(self.shape if self.whole is None else self.whole)

    def holders(self, shards: int) -> int:
        """Number of shards of the part, if weights that are no experts have `shards`."""
        return max(shards // self.experts, 1)

    def bytes(self, size: int) -> int:
        """Bytes of the weight with numbers of `size` bytes."""
        return self.elements * (1 if self.packed else size)

    def shard(self, shards: int, size: int) -> int:
        """Bytes of the first, largest of `shards` shards by rows; experts have fewer."""
        shards = self.holders(shards)
        rows = -(-self.elements // size) if self.packed else self.shape[0] if self.shape else 1
        return -(-rows // shards) * (1 if self.packed else self.elements // max(rows, 1)) * size


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A language model's weights by unit: the root's, which belong to no block, in module order,
    and those of one block of each kind; blocks of a kind differ in their names only.

    blocks: the number of each block's kind. late: names of the root's trained weights whose
    gradients come before those of any block. tied: whether the embedding is the head as well.
    parameters: elements of all weights, with each 4-bit number as one; exported: without adapters;
    proven: of the root and the largest block of the export.
    """

    root: tuple[Weight, ...]
    kinds: tuple[tuple[Weight, ...], ...]
    blocks: tuple[int, ...]
    late: tuple[str, ...]
    tied: bool
    vocabulary: int
    parameters: int
    exported: int
    proven: int
    caveats: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    """Names of the root's weights that come behind the blocks."""

    def counted(self) -> Iterator[tuple[Weight, int]]:
        """Each weight of the root and of a kind, with its number of occurrences."""
        yield from ((weight, 1) for weight in self.root)
        counts = Counter(self.blocks)
        for kind, weights in enumerate(self.kinds):
            yield from ((weight, counts[kind]) for weight in weights)

    @functools.cached_property
    def trained(self) -> int:
        """Elements of the trained weights of the whole model."""
        return sum(one.all_elements * count for one, count in self.counted() if one.trained)

    @functools.cached_property
    def stored(self) -> int:
        """Elements of the weights that a checkpoint holds: all but the frozen base."""
        return sum(one.all_elements * count for one, count in self.counted() if not one.frozen_base)

    @functools.cached_property
    def embedding(self) -> Weight:
        """The first of the root's matrices with a row for each token of the vocabulary."""
        tables = (one for one in self.root if (one.whole or one.shape)[:1] == (self.vocabulary,))
        return next(tables, self.root[0])


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of a number in each dtype of the precision policy."""

    master: int
    compute: int
    reduce: int

    @classmethod
    def by(cls, precision: Precision) -> Sizes:
        """The sizes of a policy's dtypes."""
        dtypes = ("master", "compute", "reduce")
        return cls(**{name: BYTES[getattr(precision, name)] for name in dtypes})

    def of(self, weight: Weight) -> int:
        """Bytes of one number of the weight in the dtype in which it is held."""
        return self.compute if weight.frozen_base else self.master


@dataclass(frozen=True, kw_only=True)
class SampleShape:
    """Tokens of the longest sample. Attention needs a mask where samples are `packed`, with several
    documents in one."""

    length: int
    packed: bool = False


@dataclass(frozen=True, kw_only=True)
class Step:
    """An optimizer step: micro-batches of each data-parallel rank, samples of a micro-batch and of
    the rank with the most, samples and tokens (with padding) over all ranks, and the training's
    length."""

    microbatches: int
    micro_batch: int
    of_rank: int
    samples: int
    tokens: int
    length: TrainingLength = field(default_factory=TrainingLength)


@dataclass(frozen=True, kw_only=True)
class OptimizerShape:
    """Memory of an optimizer (`OptimizerPlan.algorithm`). moments: number of an element's moments;
    bits: of all of them, with scales; taken: temporary bytes of an update for each element of the
    largest parameter."""

    algorithm: str
    bits: float
    moments: int
    taken: float = 0.0

    def state(self, elements: int) -> int:
        """Bytes of optimizer state for `elements` elements."""
        return round(elements * self.bits / 8)

    def touched(self, elements: int, size: int) -> int:
        """Bytes read and written to update `elements` weights of `size` bytes: weights and
        optimizer state in both directions, and gradients, which are also read for the norm and
        clipped."""
        return elements * (2 * size + 4 * size) + 2 * self.state(elements)

    def update(self, largest: int) -> int:
        """Temporary bytes of an update, whose largest parameter has `largest` elements."""
        return round(self.taken * largest)


@dataclass(frozen=True)
class Extra:
    """Bytes that a stage needs beside the step: memory of one host in some phases, or files."""

    what: str
    bytes: int
    phases: Sequence[str] = ()


class Moment(NamedTuple):
    """A moment of a step, in its first or last micro-batch, or in one between. In a pipeline
    `first` says that no backward of the stage is over, `last` that all are, `whole` that the
    backward before left the stage's units gathered."""

    event: Event
    unit: Unit = "head"
    first: bool = True
    last: bool = True
    whole: bool = False


class Item(NamedTuple):
    """Bytes that one rank holds."""

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
        """The sum of some items."""
        held = {item: size for item, size in items.items() if size}
        return cls(bytes=sum(held.values()), items=held)


class Gradients(NamedTuple):
    """Bytes for each element of a weight that its gradient takes in backward beside the model's
    own memory, which has the gradient in the compute dtype. kept: from its computation until the
    unit's gradients are reduced; passing: only at its computation."""

    kept: float
    passing: float


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
    """Bytes that one rank moves in an optimizer step: up from the host to its accelerator, down
    again, and to and from a disk."""

    up: int = 0
    down: int = 0
    disk: int = 0


Kind = Literal["forward", "backward", "inputs", "weights", "gather", "release", "reduce"]
"""Kinds of a pipeline's passes: forward; backward, or its halves for gradients of inputs and of
weights; and for whole stages: to gather all of its units, to give them up, to reduce gradients."""


class Pass(NamedTuple):
    """What a rank of a pipeline does next: with a micro-batch in one of its stages, which are
    numbered from 0 on each rank."""

    kind: Kind
    stage: int
    microbatch: int = 0


@dataclass(frozen=True, kw_only=True)
class PipelineStage:
    """Consecutive blocks on a rank, with the embeddings before the first block and the head behind
    the last, and what the strategy holds of them. hidden, tokens: bytes for each sample of a
    micro-batch of hidden states, and of its tokens."""

    blocks: range
    first: bool
    last: bool
    memory: StrategyMemory
    hidden: int
    tokens: int

    @property
    def received(self) -> int:
        """Number of tensors of hidden states, or their gradients, that are received for a
        micro-batch; as many are sent."""
        return (not self.first) + (not self.last)


@dataclass(frozen=True, kw_only=True)
class PipelineRank:
    """One of `ranks` ranks of a pipeline, whose numbers are `apart` from each other: its stages,
    and its passes in order. idle: share of a step in which it has nothing to do. microbatches:
    those of the schedule, which may be more than those with samples."""

    ranks: int
    apart: int
    stages: Sequence[PipelineStage]
    passes: Sequence[Pass]
    idle: float
    microbatches: int


class StrategyMemory(ABC):
    """A strategy's share of a training, forecast by the wrap stage's planner."""

    ranks: int
    """Data-parallel ranks."""
    averaged: int = 0
    """Bytes of averages of each trained element, which are saved beside moments."""
    masters: tuple[int, Place]
    """Elements of the trained weights that this rank updates, and their place."""
    updated: int
    """Bytes that an update reads and writes in the device's memory."""

    @abstractmethod
    def held(self, moment: Moment) -> Iterator[Item]:
        """Everything held at a moment except activations and the gradients of the unit in backward
        (see `gradients`)."""

    @abstractmethod
    def gradients(self, moment: Moment) -> Gradients:
        """Bytes for an element of the unit in backward."""

    @abstractmethod
    def traffic(self, microbatches: int) -> Iterator[Traffic]:
        """Collectives of an optimizer step of `microbatches` micro-batches, beside those inside of
        the model."""

    def pipeline(self, microbatches: int) -> Sequence[PipelineRank]:
        """The ranks of a pipeline in an optimizer step; none without a pipeline, where `held` is
        what every rank holds."""
        return ()

    def copies(self, microbatches: int) -> Copies:
        """Copies between places in an optimizer step of `microbatches` micro-batches."""
        return Copies()
