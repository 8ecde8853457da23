"""Memory, traffic and copies of DeepSpeed ZeRO on one rank (Rajbhandari et al. 2020).

docs/dev/zero-memory.md has the formulas, explains their letters, and how they were measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pipeline import Precision
from pipeline.planning import (
    GRADIENTS,
    IN_BACKWARD,
    OPTIMIZER,
    PARAMETERS,
    UPDATE_TEMPORARIES,
    WHOLE_GRADIENTS,
    Collective,
    Copies,
    Gradients,
    Item,
    ModelShape,
    Moment,
    OptimizerShape,
    Place,
    Sizes,
    StrategyMemory,
    Traffic,
    Unit,
    Weight,
)
from stages.wrap.zero.stage import Zero, uses_cpu_adam

SUMMED = 4
"""Bytes of a gradient's element summed over micro-batches: `grad_accum_dtype` is always fp32."""
ENGINE_BUCKET = 500_000_000
"""Elements that bf16_optimizer.py reduces at a time (engine.py), whatever the recipe says."""


class Amounts(NamedTuple):
    """A unit at its backward. trained, largest, before: elements that are trained, of its largest
    trained parameter, and whose gradients were computed before; widest, left: bytes of its largest
    parameter, and of all parameters that backward still needs."""

    trained: int
    largest: int
    before: int
    widest: int
    left: int


class ZeroMemory(StrategyMemory):
    """Stages 1 and 2 (zero/stage_1_and_2.py): compute weights are whole, gradients go through a
    bucket, and each rank keeps its part of their sum and of the states. Stage 1 keeps gradients
    whole until the step."""

    def __init__(
        self, stage: Zero, model: ModelShape, precision: Precision, optimizer: OptimizerShape, *,
        ranks: int, apart: int = 1,
    ) -> None:  # fmt: skip
        """`ranks` hold the same part of the model, their numbers `apart` from each other."""
        self.ranks, self.stage, self.model, self.optimizer = ranks, stage, model, optimizer
        self.apart = apart
        sizes, offload = Sizes.by(precision), stage.offload_optimizer
        self.c, self.m, self.r = sizes.compute, sizes.master, sizes.reduce
        self.compute, self.bucket = precision.compute, stage.reduce_bucket_size
        self.low = self.c < SUMMED
        """Whether gradients are computed in fewer bits than they are summed in."""
        self.offloaded = offload is not None
        self.contiguous = stage.contiguous_gradients or self.offloaded
        """Whether gradients are copied into a buffer as they come."""
        self.accumulates = stage.stage == 1 and self.compute == "bf16" and not self.offloaded
        """Whether bf16_optimizer.py runs: gradients are whole in bf16, their sums whole in fp32 all
        the time, and there is no bucket."""
        self.whole = (stage.stage == 1) * (self.c if self.accumulates else SUMMED)
        """Bytes of an element of gradients that are whole until the step."""
        buffers = (2 if stage.overlap_comm else 1) * self.contiguous * (not self.accumulates)
        self.buffer = (self.whole or self.c) * buffers * self.bucket
        """Bytes of the bucket of stages 1 and 2, allocated whole, however small the model."""
        at: dict[str | None, Place] = {None: "device", "cpu": "host", "nvme": "disk"}
        self.states_at = at[offload.device if offload else None]
        in_kernel = uses_cpu_adam(stage, optimizer.algorithm)
        self.moments = 8 if in_kernel else optimizer.bits / 8
        """Bytes of an element's moments, which DeepSpeed's CPU Adam keeps in fp32."""
        self.trained = model.trained
        self.every = sum(weight.bytes(self.c) * count for weight, count in model.counted())
        """Bytes of all weights in the compute dtype."""
        self.part = self.share(self.trained)
        self.masters = self.part, "host" if self.offloaded else "device"
        self.updated = optimizer.touched(self.part, self.m) * (not self.offloaded)
        self.units = self._units()
        self.largest = max(unit.largest for unit in self.units.values())

    def share(self, elements: int) -> int:
        """A rank's padded part of this number of elements."""
        return -(-elements // self.ranks)

    def _units(self) -> dict[Unit, Amounts]:
        model, before, left = self.model, self.trained, 0
        weights: dict[Unit, tuple[Weight, ...]] = {"embeddings": (model.embedding,)}
        weights |= {place: model.kinds[kind] for place, kind in enumerate(model.blocks)}
        weights["head"] = tuple(one for one in model.root if one is not model.embedding)
        found: dict[Unit, Amounts] = {}
        for unit, own in weights.items():
            trained = [weight.elements for weight in own if weight.trained]
            every = [weight.bytes(self.c) for weight in own]
            before -= sum(trained)
            left += sum(every) if trained or unit != "embeddings" else 0  # frozen: no backward
            most = max(trained, default=0), before, max(every, default=0)
            found[unit] = Amounts(sum(trained), *most, left)
        return found

    def held(self, moment: Moment) -> Iterator[Item]:
        if moment.event == "load":  # the first update makes moments
            yield from (item for item in self.states() if item.name != OPTIMIZER)
            yield Item("weights as they are made", "device", self.loading())
            return
        yield from self.states()
        yield from self.passing(moment)
        if moment.event == "step":
            yield Item(UPDATE_TEMPORARIES, "device", self.step())
        elif moment.event in IN_BACKWARD:
            yield from self._backward(moment)

    def _backward(self, moment: Moment) -> Iterator[Item]:
        """Gradients beside those that a unit computes. A full bucket is reduced while the next
        gradient waits, a larger gradient alone, the rest at the end."""
        unit, c, embedding, size = self.units[moment.unit], self.c, self.model.embedding, 0
        came = unit.before + unit.trained
        if moment.event == "reduce" and (came > self.bucket or moment.unit == "embeddings"):
            size = self.flattened(unit) * min(came, max(self.bucket, unit.largest))
            size += c * unit.largest * (came > self.bucket)
        if not self.whole:
            yield Item("reduction", "device", size)
            yield Item(WHOLE_GRADIENTS, "device", c * self.kept(moment))
        # Autograd keeps a tied head's until that of the embeddings is there.
        apart = (moment.event, moment.unit) in (("backward", "head"), ("reduce", "embeddings"))
        size = c * embedding.elements * (self.model.tied and embedding.trained and not apart)
        yield Item("gradient of the tied head", "device", size)

    def states(self) -> Iterator[Item]:
        """Items that last from loading to the end."""
        m, o = self.m, self.moments
        yield Item("master weights", self.states_at, m * self.part)
        yield Item(OPTIMIZER, self.states_at, round(o * self.part))
        yield from self.beside()

    def beside(self) -> Iterator[Item]:
        """Compute weights, and other items that last."""
        c, m, copied = self.c, self.m, self.c * self.largest
        yield Item(PARAMETERS, "device", self.every)
        if self.accumulates:
            yield Item("summed gradients", "device", SUMMED * self.trained)
        if self.offloaded:
            size = (m + c + SUMMED * (not self.low)) * self.part + copied
            yield Item("gradients and updated weights", "host", size)
            yield Item("gradient to copy", "device", copied)

    def loading(self) -> int:
        """Bytes of the device beside states as these are loaded: weights are made in the masters'
        dtype and cast, or copied into one buffer; then gradients of masters are there."""
        masters = self.m * self.part * (not self.offloaded)
        made = max(self.m - self.c, self.c) * self.trained
        return 0 if self.accumulates else max(made - masters, masters)

    def passing(self, moment: Moment) -> Iterator[Item]:
        """Summed gradients and buffers, which come and go."""
        unit, event, later = self.units[moment.unit], moment.event, not moment.first
        backward, step = event in IN_BACKWARD, event == "step"
        if backward or (self.whole and later):
            yield Item("reduce bucket", "device", self.buffer)
        if self.whole and (self.accumulates or not step):
            computed = (unit.before + unit.trained * (event == "reduce")) * backward
            size = self.whole * (self.trained if later or step else computed)
            yield Item(GRADIENTS, "device", size)
            return
        # New fp32 ones are added to those of the micro-batches before when all are there.
        parts = later + (backward and unit.before > self.bucket) + step
        if self.low:
            parts = min(parts + (event == "reduce"), 1)
        size = parts * SUMMED * self.part * (self.low or not self.offloaded)
        yield Item(GRADIENTS, "device", size)

    def flattened(self, unit: Amounts) -> int:
        """Bytes of an element of a bucket in its reduction: flattened, unless of one gradient, and
        cast to the reduce dtype (allreduce_bucket)."""
        return self.c * (unit.largest <= self.bucket) + self.r * (self.r != self.c)

    def kept(self, moment: Moment) -> int:
        """Elements of gradients that are neither in the bucket nor summed. A gradient larger than
        the bucket stays, in a rank's own part, until the end of backward."""
        unit = self.units[moment.unit]
        alone = self.low and unit.largest > self.bucket and isinstance(moment.unit, int)
        most = self.part * alone if self.contiguous else self.part + self.bucket
        return min(unit.before, most)

    def step(self) -> int:
        """Bytes for norms, taken in fp64, and the update; at stage 1, or for the reduction."""
        taken = 8 * min(self.largest, self.part)
        if not self.offloaded:
            copied = self.m * self.part * (not self.low or self.m != SUMMED)
            taken = max(taken, copied + self.optimizer.update(self.part))
        filled = min(self.trained, ENGINE_BUCKET if self.accumulates else self.bucket)
        if self.accumulates:
            return max(taken, SUMMED * filled + self.r * self.trained * (self.r != SUMMED))
        rest = self.trained - filled * (not self.low)
        return max(taken, (SUMMED * rest + self.buffer) * (self.stage.stage == 1))

    def gradients(self, moment: Moment) -> Gradients:
        c, whole = self.c, self.whole
        if whole:
            return Gradients(whole * moment.first, c * (c != whole) + whole * (not moment.first))
        return Gradients(0, c) if self.contiguous else Gradients(c, 0)

    def gathered(self, microbatches: int) -> int:
        """Bytes of parameters that are gathered in an optimizer step."""
        return self.c * self.trained

    def traffic(self, microbatches: int) -> Iterator[Traffic]:
        w, stage, moved = self.ranks, self.stage.stage, self.gathered(microbatches)
        sent = self.r * self.trained * (1 if stage == 1 else microbatches)
        # Stages 1 and 2 give all ranks all of it (use_multi_rank_bucket_allreduce).
        by: Collective = "reduce-scatter" if stage == 3 else "all-reduce"
        if w > 1:
            groups: dict[str, Any] = {"ranks": w, "apart": self.apart}
            yield Traffic(collective=by, bytes=sent, what="gradients", **groups)
            yield Traffic(collective="all-gather", bytes=moved, what="parameters", **groups)

    def copies(self, microbatches: int) -> Copies:
        """Gradients go down to the masters, updated weights up, or parameters whenever they are
        gathered. Sums in host memory go up and down in each micro-batch."""
        stage, far = self.stage.stage, self.stage.offload_param is not None
        if not (far or self.offloaded):
            return Copies()
        adds = stage == 3 or (not self.low and microbatches > 1)
        times = (1 if stage == 1 else microbatches) * adds
        sums = SUMMED * self.part * times * self.offloaded
        read = self.share(self.gathered(microbatches)) if far else self.c * self.part
        return Copies(up=read + sums, down=self.m * self.part + sums)
