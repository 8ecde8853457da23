"""Sizes of what is trained, without a tensor: weights, samples, the optimizer's state."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.contracts.precision import Precision
from pipeline.contracts.training import TrainingLength

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number in a recipe's dtypes."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter, under its name in the model's module; tied ones are one. One of the frozen base
    (`ModelSource.frozen_base`) is held in the compute dtype; elements of a `packed` one are bytes,
    as in weights of 4 bits."""

    name: str
    shape: tuple[int, ...]
    trained: bool = True
    frozen_base: bool = False
    packed: bool = False

    @functools.cached_property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def bytes(self, size: int) -> int:
        """Bytes of it, as numbers of `size` bytes if its elements are numbers."""
        return self.elements * (1 if self.packed else size)

    def shard(self, shards: int, size: int) -> int:
        """Bytes of the largest of `shards` shards by rows, which is the first."""
        rows = -(-self.elements // size) if self.packed else self.shape[0] if self.shape else 1
        return -(-rows // shards) * (1 if self.packed else self.elements // max(rows, 1)) * size


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A language model's weights by unit: the root's, which belong to no block, in module order,
    and those of one block of each kind; blocks of a kind are alike but for their names.

    blocks: the number of each block's kind. late: names of the root's trained weights whose
    gradients come before those of any block. tied: whether the embedding is the head as well.
    parameters: numbers of all weights, those in 4 bits counted as numbers; exported: without
    adapters; proven: of the root and the largest block of that.
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

    def counted(self) -> Iterator[tuple[Weight, int]]:
        """Each weight of the root and of a kind, and how many there are of it."""
        yield from ((weight, 1) for weight in self.root)
        counts = Counter(self.blocks)
        for kind, weights in enumerate(self.kinds):
            yield from ((weight, counts[kind]) for weight in weights)

    @functools.cached_property
    def trained(self) -> int:
        """Elements of the trained weights."""
        return sum(one.elements * count for one, count in self.counted() if one.trained)

    @functools.cached_property
    def stored(self) -> int:
        """Elements of the weights that a checkpoint holds: those that are not frozen_base."""
        return sum(one.elements * count for one, count in self.counted() if not one.frozen_base)

    @functools.cached_property
    def embedding(self) -> Weight:
        """The first of the root's matrices with a row for each token of the vocabulary."""
        tables = (one for one in self.root if one.shape[:1] == (self.vocabulary,))
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
    """Samples of the data: tokens of the longest, and whether several documents are in one, so that
    attention needs a mask."""

    length: int
    packed: bool = False


@dataclass(frozen=True, kw_only=True)
class Step:
    """An optimizer step, as the stage that trains cuts it: micro-batches of each rank, samples of
    one and of the rank that has most, samples and tokens, padding counted, over all ranks, and the
    length of the training."""

    microbatches: int
    micro_batch: int
    of_rank: int
    samples: int
    tokens: int
    length: TrainingLength = field(default_factory=TrainingLength)


@dataclass(frozen=True, kw_only=True)
class OptimizerShape:
    """Memory of an optimizer (`OptimizerPlan.algorithm`): how many moments it keeps of an element,
    bits of all of them, scales counted, and bytes that an update takes for a moment, for each
    element of the largest parameter or, `at_once`, of all."""

    algorithm: str
    bits: float
    moments: int
    taken: float = 0.0
    at_once: bool = False

    def state(self, elements: int) -> int:
        """Bytes of optimizer state for `elements` elements."""
        return round(elements * self.bits / 8)

    def touched(self, elements: int, size: int) -> int:
        """Bytes read and written to update `elements` weights of `size` bytes: weights and
        optimizer state in both directions, and gradients, which are also read for the norm and
        clipped."""
        return elements * (2 * size + 4 * size) + 2 * self.state(elements)

    def update(self, largest: int, total: int) -> int:
        """Bytes taken for a moment to update `total` elements, `largest` of them in one
        parameter."""
        return round(self.taken * (total if self.at_once else largest))
