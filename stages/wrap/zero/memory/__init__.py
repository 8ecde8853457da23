"""Memory that every stage of DeepSpeed ZeRO takes on one rank (Rajbhandari et al. 2020).

In formulas, N are trained and F frozen elements, n those of one parameter, W ranks, `filled` what
a reduction finds in the bucket; numbers are bytes of an element. docs/zero-memory.md says how they
were measured.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipeline.artifacts import Precision
from pipeline.planning.shapes import ModelShape, OptimizerShape, Sizes, Weight
from pipeline.planning.strategy import IN_BACKWARD, OPTIMIZER, Item, Moment, StrategyMemory, Unit
from pipeline.planning.timeline import Place
from stages.wrap.zero.kernels import uses_deepspeed_kernel
from stages.wrap.zero.stage import Zero

SUMMED = 4
"""Bytes of a gradient's element summed over micro-batches: `grad_accum_dtype` is always fp32."""
NORM = 8
"""Bytes of an element while its norm is taken, in fp64 (zero/utils.py, get_norm_dtype)."""
KERNEL_BITS = 64
"""Bits of an element's moments in DeepSpeed's kernels, which keep them in fp32."""


class Amounts(NamedTuple):
    """Elements of a unit as backward comes to it: trained, of its largest trained and its largest
    parameter; of gradients computed before, and of those the ones that are larger than the bucket;
    of all parameters that backward still needs."""

    trained: int
    largest: int
    widest: int
    before: int
    beyond: int
    left: int


class ZeroMemory(StrategyMemory):
    """Each rank updates its part of the master weights; all else is up to the stage."""

    def __init__(
        self, stage: Zero, model: ModelShape, precision: Precision, optimizer: OptimizerShape, *,
        ranks: int,
    ) -> None:  # fmt: skip
        self.ranks, self.stage, self.model, self.optimizer = ranks, stage, model, optimizer
        sizes, offload = Sizes.by(precision), stage.offload_optimizer
        self.c, self.m, self.r = sizes.compute, sizes.master, sizes.reduce
        self.low = self.c < SUMMED
        """Whether gradients are computed in fewer bits than they are summed in."""
        self.scaled = precision.compute == "fp16"
        """Whether gradients are looked through for infinities."""
        self.offloaded = offload is not None
        at: dict[str | None, Place] = {None: "device", "cpu": "host", "nvme": "disk"}
        self.states_at = at[offload.device if offload else None]
        in_kernel = uses_deepspeed_kernel(stage, optimizer.algorithm)
        self.moments = (KERNEL_BITS if in_kernel else optimizer.bits) / 8
        """Bytes of an element's moments."""
        self.trained = model.trained
        self.frozen = sum(self.size(w) * n for w, n in model.counted() if not w.trained)
        self.part = self.share(self.trained)
        self.units = self._units()
        self.largest = max(unit.largest for unit in self.units.values())

    def share(self, elements: int) -> int:
        """A rank's part of so many elements, padded."""
        return -(-elements // self.ranks)

    def size(self, weight: Weight) -> int:
        """Elements of a weight: of a packed one, numbers of the compute dtype in as many bytes."""
        return -(-weight.bytes(self.c) // self.c)

    def _units(self) -> dict[Unit, Amounts]:
        model, bucket = self.model, self.stage.reduce_bucket_size
        head = [weight for weight in model.root if weight is not model.embedding]
        forward: list[tuple[Unit, Sequence[Weight]]] = [("embeddings", [model.embedding])]
        forward += [*enumerate(model.kinds[kind] for kind in model.blocks), ("head", head)]
        found: dict[Unit, Amounts] = {}
        large = sum(n * w.elements for w, n in model.counted() if w.trained and w.elements > bucket)
        before, left = self.trained, 0
        for unit, weights in forward:
            trained = [weight.elements for weight in weights if weight.trained]
            every = [self.size(weight) for weight in weights]
            before -= sum(trained)
            large -= sum(elements for elements in trained if elements > bucket)
            if trained or unit != "embeddings":  # frozen ones have no backward
                left += sum(every)
            most = max(trained, default=0), max(every, default=0)
            found[unit] = Amounts(sum(trained), *most, before, large, left)
        return found

    def held(self, moment: Moment) -> Iterator[Item]:
        if moment.event == "load":  # the first update makes moments
            born = [item for item in self.states() if item.name != OPTIMIZER]
            there = sum(item.bytes for item in born if item.where == "device")
            yield Item(
                "states as they are made", "device", self.loading(there), "and whole weights"
            )
            yield from (item for item in born if item.where != "device")
            return
        yield from self.states()
        if moment.event == "step":
            yield from self.step()
        elif moment.event in IN_BACKWARD:
            yield from self.backward(moment)
            yield from self._tied(moment)

    @abstractmethod
    def states(self) -> Iterator[Item]:
        """Everything that is there from loading to the end."""
        m, o = self.m, self.moments
        yield Item("master weights", self.states_at, m * self.part, f"{m} N/W")
        yield Item(OPTIMIZER, self.states_at, round(o * self.part), f"{o:.4g} N/W")

    @abstractmethod
    def loading(self, states: int) -> int:
        """The most bytes of the device while states of so many bytes are loaded."""

    @abstractmethod
    def backward(self, moment: Moment) -> Iterator[Item]:
        """Gradients and buffers, but those that a unit computes."""

    @abstractmethod
    def step(self) -> Iterator[Item]:
        """Gradients and temporaries of an update."""

    def taken(self, elements: int) -> int:
        """Bytes of the device that the optimizer takes to update so many elements at a time."""
        return 0 if self.offloaded else self.optimizer.update(elements, elements)

    def fills(self, moment: Moment) -> Iterator[tuple[int, int]]:
        """Elements that reductions of a unit's gradients find in the bucket, and those of the
        gradient that does not fit any more. One larger than the bucket is reduced alone."""
        unit, bucket = self.units[moment.unit], self.stage.reduce_bucket_size
        came = unit.before + unit.trained
        if moment.event == "reduce" and unit.largest > bucket:
            yield from [(min(unit.before, bucket), unit.largest), (unit.largest, 0)]
        elif moment.event == "reduce" and (came > bucket or moment.unit == "embeddings"):
            yield min(came, bucket), unit.largest * (came > bucket)

    def _tied(self, moment: Moment) -> Iterator[Item]:
        """A tied head's gradient is kept by autograd until that of the embeddings is there."""
        embedding, c = self.model.embedding, self.c
        apart = (moment.event, moment.unit) in (("backward", "head"), ("reduce", "embeddings"))
        if self.model.tied and embedding.trained and not apart:
            yield Item("gradient of the tied head", "device", c * embedding.elements, f"{c} n")

    @property
    def masters(self) -> tuple[int, Place]:
        return self.part, "host" if self.offloaded else "device"

    @property
    def updated(self) -> int:
        return 0 if self.offloaded else self.optimizer.touched(self.part, self.m)
