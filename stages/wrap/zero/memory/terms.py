"""What a forecast of ZeRO's memory is made from, and what it is made of."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stages.wrap.zero.stage import Zero

Where = Literal["device", "host", "disk"]
Moment = Literal["load", "forward", "loss", "begin", "backward", "reduce", "step", "between"]
"""`begin` is backward before its first gradient is computed; `reduce` is the most within the
reduction of gradients that falls into a block's backward; `between` is at rest after a step, or
after a micro-batch where gradients accumulate."""
Place = int | Literal["embeddings", "head"]
"""Number of a transformer block; what is used before the first, and after the last."""
Dtype = Literal["fp32", "bf16", "fp16"]
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
ACCUMULATED = 4
"""Bytes of a gradient's element summed over micro-batches: `grad_accum_dtype` is always fp32."""
NORM = 8
"""Bytes of an element while its norm is taken: DeepSpeed takes norms in fp64 (zero/utils.py,
get_norm_dtype)."""


class Weight(NamedTuple):
    """A parameter; frozen ones have no master, gradient or moments."""

    elements: int
    trained: bool = True


@dataclass(frozen=True)
class Weights:
    """A model's parameters, tied ones once."""

    blocks: tuple[tuple[Weight, ...], ...]
    """Of each transformer block, in the order of their use."""
    root: tuple[Weight, ...]
    """The embeddings, then what is used after the last block: final norm and head."""
    tied: bool = False
    """The head uses the embeddings."""

    @functools.cached_property
    def all(self) -> tuple[Weight, ...]:
        """In module order: embeddings, blocks, final norm, head."""
        inner = [weight for block in self.blocks for weight in block]
        return (*self.root[:1], *inner, *self.root[1:])

    @functools.cached_property
    def trained(self) -> tuple[int, ...]:
        """Elements of each trained parameter, in module order."""
        return tuple(weight.elements for weight in self.all if weight.trained)

    @functools.cached_property
    def frozen(self) -> tuple[int, ...]:
        """Elements of each frozen parameter."""
        return tuple(weight.elements for weight in self.all if not weight.trained)

    @functools.cached_property
    def reversed(self) -> tuple[tuple[Place, int], ...]:
        """Place and elements of trained parameters in the order of backward. A tied head's gradient
        is complete with that of the embeddings."""
        placed: list[tuple[Place, Weight]] = [("embeddings", one) for one in self.root[:1]]
        for number, block in enumerate(self.blocks):
            placed += [(number, weight) for weight in block]
        placed += [("head", weight) for weight in self.root[1:]]
        return tuple((place, one.elements) for place, one in reversed(placed) if one.trained)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All that decides on bytes besides the weights."""

    stage: Zero
    world: int
    compute: Dtype = "bf16"
    master: Dtype = "fp32"
    reduce: Dtype = "fp32"
    moment_bytes: int = 8
    """Of all moments together, for an element."""
    groups: int = 2
    """Optimizer groups with parameters: those with weight decay and those without."""

    @property
    def compute_bytes(self) -> int:
        return BYTES[self.compute]

    @property
    def master_bytes(self) -> int:
        return BYTES[self.master]

    @property
    def reduce_bytes(self) -> int:
        return BYTES[self.reduce]

    @property
    def state_at(self) -> Where:
        """Where masters and moments are."""
        offload = self.stage.offload_optimizer
        if offload is None:
            return "device"
        return "host" if offload.device == "cpu" else "disk"

    def share(self, elements: int) -> int:
        """A rank's part of so many elements, padded."""
        return math.ceil(elements / self.world)

    def splits(self, begin: int, elements: int, total: int) -> bool:
        """Whether such a range of `total` elements is parts of several ranks."""
        part = self.share(total)
        return begin // part != (begin + elements - 1) // part

    def shares(self, sizes: Sequence[int]) -> int:
        """A rank's parts of parameters that are each cut on their own."""
        return sum(map(self.share, sizes))


class Fill(NamedTuple):
    """A reduction in backward."""

    place: Place
    """In whose backward it falls."""
    elements: int
    """Reduced."""
    waiting: int
    """Of the gradient that did not fit any more."""
    after: int
    """Gradients computed before."""
    tensors: int
    """Gradients reduced."""


def bucket_fills(gradients: Sequence[tuple[Place, int]], bucket: int) -> list[Fill]:
    """Every reduction of a backward (zero/stage_1_and_2.py, zero/stage3.py:
    reduce_independent_p_g_buckets_and_remove_grads)."""
    fills: list[Fill] = []
    filled = count = 0
    for after, (place, elements) in enumerate(gradients):
        if filled and filled + elements > bucket:
            fills.append(Fill(place, filled, elements, after, count))
            filled = count = 0
        filled, count = filled + elements, count + 1
    if filled:
        fills.append(Fill(gradients[-1][0], filled, 0, len(gradients), count))
    return fills
