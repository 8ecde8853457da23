"""Sizes of a model, of samples, of an optimizer and of a step, which planners hand to each other,
the ranks of a run, and how these divide a model. Nothing here makes a tensor."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.contracts.optimizer import Precision
from pipeline.contracts.training import TrainingLength

if TYPE_CHECKING:
    from pipeline.contracts.data import MicroBatch

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number in a recipe's dtypes."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter, under its name in the model's module; tied parameters are one. A `frozen_base`
    weight (`ModelSource.frozen_base`) is held in the compute dtype; elements of a `packed` one are
    bytes, as in weights of 4 bits. shape: of the part that one rank computes with. whole: of the
    model's weight, if ranks divide it. experts: number of ranks that have different experts of it,
    by which it is sharded less."""

    name: str
    shape: tuple[int, ...]
    trained: bool = True
    frozen_base: bool = False
    packed: bool = False
    whole: tuple[int, ...] | None = None
    experts: int = 1

    @functools.cached_property
    def elements(self) -> int:
        return math.prod(self.shape)

    @functools.cached_property
    def all_elements(self) -> int:
        """Number of elements of the model's weight."""
        return math.prod(self.whole or self.shape)

    def holders(self, shards: int) -> int:
        """Number of shards of the part, if weights that are not experts have `shards`."""
        return max(shards // self.experts, 1)

    def bytes(self, size: int) -> int:
        return self.elements * (1 if self.packed else size)

    def shard(self, shards: int, size: int) -> int:
        """Bytes of the first, largest of `shards` shards by rows; experts have fewer."""
        shards = self.holders(shards)
        rows = -(-self.elements // size) if self.packed else self.shape[0] if self.shape else 1
        return -(-rows // shards) * (1 if self.packed else self.elements // max(rows, 1)) * size


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A language model's weights by unit: the root's, which belong to no block, in module order,
    and one block's of each kind; blocks of a kind differ in their names only. blocks: the number of
    each block's kind. late: names of the root's trained weights whose gradients come before any
    block's. tied: whether the embedding is the head as well. parameters: elements of all weights,
    with each 4-bit number as one; exported: without adapters; proven: of the root and the largest
    block of the export. `behind`: names of the root's weights after the blocks. ends: names of the
    weights of the embedding, if that is a plain table, and of the head."""

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
    ends: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def counted(self) -> Iterator[tuple[Weight, int]]:
        """Each weight of the root and of a kind, with its number of occurrences."""
        yield from ((weight, 1) for weight in self.root)
        for kind, weights in enumerate(self.kinds):
            yield from ((weight, self.blocks.count(kind)) for weight in weights)

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
    master: int
    compute: int
    reduce: int

    @classmethod
    def by(cls, precision: Precision) -> Sizes:
        return cls(
            master=BYTES[precision.master], compute=BYTES[precision.compute],
            reduce=BYTES[precision.reduce],
        )  # fmt: skip

    def of(self, weight: Weight) -> int:
        """Bytes of one number of the weight in the dtype in which it is held."""
        return self.compute if weight.frozen_base else self.master


@dataclass(frozen=True, kw_only=True)
class SampleShape:
    """Tokens of the longest sample. `packed`: with several documents, which attention masks."""

    length: int
    packed: bool = False


@dataclass(frozen=True, kw_only=True)
class Step:
    """An optimizer step: micro-batches of each data-parallel rank, samples of a micro-batch and of
    the rank with the most, samples and tokens (with padding) over all ranks."""

    microbatches: int
    micro_batch: int
    of_rank: int
    samples: int
    tokens: int
    length: TrainingLength = field(default_factory=TrainingLength)


@dataclass(frozen=True, kw_only=True)
class OptimizerShape:
    """Memory of an optimizer (`UpdateRule.algorithm`). moments: number of an element's moments;
    bits: of all of them, with scales; taken: temporary bytes of an update for each element of the
    largest parameter. Of several parts, means over the trained elements."""

    algorithm: str
    bits: float
    moments: float
    taken: float = 0.0

    def state(self, elements: int) -> int:
        return round(elements * self.bits / 8)

    def touched(self, elements: int, size: int) -> int:
        """Bytes read and written to update `elements` weights of `size` bytes: weights and state in
        both directions, and gradients, which are also read for the norm and clipped."""
        return elements * (2 * size + 4 * size) + 2 * self.state(elements)

    def update(self, largest: int) -> int:
        """Temporary bytes of an update, whose largest parameter has `largest` elements."""
        return round(self.taken * largest)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Ranks of a run: processes over all nodes, one a device, and one node's; `device` is `cpu` or
    `cuda`. shares: number of data-parallel ranks; None: all. stages: ranks of a pipeline."""

    ranks: int
    local_ranks: int
    device: str
    shares: int | None = None
    stages: int = 1

    @property
    def data_ranks(self) -> int:
        """Number of ranks among which the samples of a step are divided."""
        return self.ranks if self.shares is None else self.shares

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.local_ranks)

    @property
    def on_node(self) -> int:
        """Processes of the fullest node."""
        return min(self.local_ranks, self.ranks)


class Division(ABC):
    """Divides a model among ranks before a strategy shards each rank's part, so that a profile is
    of one rank's part. stages: ranks of a pipeline."""

    stages: int = 1

    @property
    @abstractmethod
    def key(self) -> Mapping[str, Any]:
        """Everything that the part depends on, as JSON."""

    @abstractmethod
    def divide(
        self, model: Any, blocks: Sequence[Any]
    ) -> tuple[Mapping[str, str], Mapping[str, int]]:
        """Divide a model, whose parameters are on the meta device, in place, in a process group of
        all ranks that sends nothing. Returns what is exchanged by the name of each group, and the
        number of ranks for weights that these divide by experts."""

    @abstractmethod
    def own(self, batch: MicroBatch) -> MicroBatch:
        """Return the first rank's part of a micro-batch."""
