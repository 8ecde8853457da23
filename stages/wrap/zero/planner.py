"""The planner of `wrap.zero`: memory, traffic and copies of DeepSpeed ZeRO on one rank (Rajbhandari
et al. 2020). docs/dev/zero-memory.md has the formulas, their letters, and how they were measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pipeline import Precision, planning
from pipeline.planning import IN_BACKWARD, Item, ModelShape, Moment, Place, Tier, Topology, Unit
from stages.wrap.axes import caveats, required
from stages.wrap.torch_planner import WrapPlanner
from stages.wrap.zero import Zero
from stages.wrap.zero.fields import uses_cpu_adam

SUMMED = 4
"""Bytes of a gradient's element summed over micro-batches: `grad_accum_dtype` is always fp32."""
ENGINE_BUCKET = 500_000_000
"""Elements that bf16_optimizer.py reduces at a time (engine.py), whatever the recipe says."""
STATES = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
BOTH = {**STATES, "offload_param": {"device": "cpu"}}
DISK = {**BOTH, "offload_optimizer": {"device": "nvme", "path": "/nvme"}}
OFFERS: dict[str, tuple[int, dict[str, object], str]] = {
    "zero1": (0, {"stage": 1}, "shards of optimizer state"),
    "zero2": (0, {"stage": 2}, "shards of optimizer state and gradients"),
    "zero3": (0, {"stage": 3}, "shards of everything"),
    "zero3-offload": (Tier.OFFLOADED, STATES, "shards, optimizer state in host memory"),
    "zero3-offload-all": (Tier.MORE_OFFLOADED, BOTH, "shards, state and parameters in host memory"),
    "zero3-nvme": (Tier.OFFLOADED_TO_DISK, DISK, "state on a disk (path), parameters on the host"),
}


class ZeroPlanner(WrapPlanner):
    stage: Zero

    @classmethod
    def presets(cls) -> planning.Presets:
        return {
            name: planning.Preset(order=order, what=what, fields=fields)
            for name, (order, fields, what) in OFFERS.items()
        }

    def forecast(
        self, topology: Topology, profile: planning.Profile, precision: Precision,
        optimizer: planning.OptimizerShape,
    ) -> ZeroMemory:  # fmt: skip
        kind = Stage3Memory if self.stage.stage == 3 else ZeroMemory
        return kind(self.stage, topology.ranks, profile.model, precision, optimizer)


class UnitSizes(NamedTuple):
    """A unit at its backward. trained, largest, before: elements that are trained, of its largest
    trained parameter, and whose gradients were computed before; widest, left: bytes of its largest
    parameter, and of all parameters that backward still needs."""

    trained: int
    largest: int
    before: int
    widest: int
    left: int


class ZeroMemory(planning.StrategyMemory):
    """Stages 1 and 2 (zero/stage_1_and_2.py): compute weights are whole, gradients go through a
    bucket, and each rank keeps its part of their sum and of the states. Stage 1 keeps gradients
    whole until the step; in bf16 (bf16_optimizer.py) their sums in fp32 all the time, and there is
    no bucket. `ranks` hold the same part of the model, their numbers `apart` from each other."""

    def __init__(
        self, stage: Zero, procs: int, model: ModelShape, precision: Precision,
        optimizer: planning.OptimizerShape,
    ) -> None:  # fmt: skip
        self.apart = required(stage, procs).tensor
        self.ranks, self.caveats = procs // self.apart, caveats(stage)
        self.stage, self.model, self.optimizer = stage, model, optimizer
        sizes, offload = planning.Sizes.by(precision), stage.offload_optimizer
        self.c, self.m, self.r = sizes.compute, sizes.master, sizes.reduce
        self.bucket, self.low = stage.reduce_bucket_size, self.c < SUMMED
        self.offloaded = offload is not None
        self.contiguous = stage.contiguous_gradients or self.offloaded
        """Whether gradients are copied into a bucket as they come, which is allocated whole."""
        bf16, first = precision.compute == "bf16", stage.stage == 1
        self.accumulates = first and bf16 and not self.offloaded
        self.whole = first * (self.c if self.accumulates else SUMMED)
        """Bytes of an element of gradients that are whole until the step."""
        buffers = (1 + bool(stage.overlap_comm)) * self.contiguous * (not self.accumulates)
        self.buffer = (self.whole or self.c) * buffers * self.bucket
        """Bytes of the bucket of stages 1 and 2, however small the model."""
        at: dict[str | None, Place] = {None: "device", "cpu": "host", "nvme": "disk"}
        self.states_at = at[offload.device if offload else None]
        self.moments = 8 if uses_cpu_adam(stage, optimizer.algorithm) else optimizer.bits / 8
        counted = [*model.counted()]
        self.every = sum(weight.bytes(self.c) * count for weight, count in counted)
        """Bytes of all weights in the compute dtype."""
        self.trained = sum(w.elements * count for w, count in counted if w.trained)
        self.part = self.share(self.trained)
        self.masters = self.part, "host" if self.offloaded else "device"
        self.updated = optimizer.touched(self.part, self.m) * (not self.offloaded)
        self.units, before, left = dict[Unit, UnitSizes](), self.trained, 0
        units: dict[Unit, Sequence[planning.Weight]] = {"embeddings": [model.embedding]}
        units |= {n: model.kinds[kind] for n, kind in enumerate(model.blocks)}
        units["head"] = [one for one in model.root if one is not model.embedding]
        for unit, own in units.items():
            trained = [weight.elements for weight in own if weight.trained]
            every = [weight.bytes(self.c) for weight in own]
            before -= sum(trained)
            left += sum(every) if trained or unit != "embeddings" else 0  # frozen: no backward
            most = max(trained, default=0), before, max(every, default=0)
            self.units[unit] = UnitSizes(sum(trained), *most, left)
        self.largest = max(unit.largest for unit in self.units.values())

    def share(self, elements: int) -> int:
        """A rank's padded part of this number of elements."""
        return -(-elements // self.ranks)

    def held(self, moment: Moment) -> Iterator[Item]:
        event, unit, c = moment.event, self.units[moment.unit], self.c
        yield Item("master weights", self.states_at, self.m * self.part)
        yield from self._lasting(event)
        if event == "load":  # the first update makes moments
            return
        yield Item(planning.OPTIMIZER, self.states_at, round(self.moments * self.part))
        yield from self._passing(moment, unit)
        if event not in IN_BACKWARD:
            return
        if not self.whole:
            # A full bucket is reduced while the next gradient waits, the rest at the end.
            came, size = unit.before + unit.trained, 0
            if event == "reduce" and (came > self.bucket or moment.unit == "embeddings"):
                flat = c * (unit.largest <= self.bucket) + self.r * (self.r != c)
                flat = self.r if self.stage.stage == 3 else flat
                size = flat * min(came, max(self.bucket, unit.largest))
                size += c * unit.largest * (came > self.bucket)
            yield Item("reduction", "device", size)
            # A gradient larger than the bucket stays, in a rank's own part, until the end.
            large = unit.largest > self.bucket and isinstance(moment.unit, int)
            waits = self.part * (self.low and large and self.stage.stage == 2)
            waits = waits if self.contiguous else self.bucket + self.part
            yield Item(planning.WHOLE_GRADIENTS, "device", c * min(unit.before, waits))
        # Autograd keeps a tied head's until the embeddings' own is there.
        done = (event, moment.unit) in (("backward", "head"), ("reduce", "embeddings"))
        waits = self.model.tied and self.model.embedding.trained and not done
        size = c * self.model.embedding.elements * waits
        yield Item("gradient of the tied head", "device", size)

    def _lasting(self, event: str) -> Iterator[Item]:
        """Items that last from loading to the end, without masters, and items of loading: weights
        are made in the masters' dtype and cast or copied; then gradients of masters are there."""
        c, m, copied = self.c, self.m, self.c * self.largest * self.offloaded
        yield Item(planning.PARAMETERS, "device", self.every)
        yield Item("summed gradients", "device", SUMMED * self.trained * self.accumulates)
        size = (m + c + SUMMED * (not self.low)) * self.part * self.offloaded
        yield Item("gradients and updated weights", "host", size + copied)
        yield Item("gradient to copy", "device", copied)
        if event == "load" and not self.accumulates:
            masters = m * self.part * (not self.offloaded)
            made = max(max(m - c, c) * self.trained - masters, masters)
            yield Item("weights as they are made", "device", made)

    def _passing(self, moment: Moment, unit: UnitSizes) -> Iterator[Item]:
        """Summed gradients and buffers, which come and go; in the step norms, taken in fp64, and
        the update, or at stage 1 the reduction."""
        later, step = not moment.first, moment.event == "step"
        reduce, backward = moment.event == "reduce", moment.event in IN_BACKWARD
        if backward or (self.whole and later):
            yield Item("reduce bucket", "device", self.buffer)
        # Parts in fp32 are added to those of the micro-batches before when all are there.
        parts = later + (backward and unit.before > self.bucket) + step
        parts = min(parts + reduce, 1) if self.low else parts
        size = parts * SUMMED * self.part * (self.low or not self.offloaded)
        if self.whole and (self.accumulates or not step):
            came = (unit.before + unit.trained * reduce) * backward
            size = self.whole * (self.trained if later or step else came)
        yield Item(planning.GRADIENTS, "device", size)
        taken = 8 * min(self.largest, self.part)
        if not self.offloaded:
            copied = self.m * self.part * (not self.low or self.m != SUMMED)
            taken = max(taken, copied + self.optimizer.update(self.part))
        filled = min(self.trained, ENGINE_BUCKET if self.accumulates else self.bucket)
        if self.accumulates:
            taken = max(taken, SUMMED * filled + self.r * self.trained * (self.r != SUMMED))
        elif self.whole:
            taken = max(taken, SUMMED * (self.trained - filled * (not self.low)) + self.buffer)
        yield Item(planning.UPDATE_TEMPORARIES, "device", taken * step)

    def gradients(self, moment: Moment) -> tuple[int, int]:
        c, whole = self.c, self.whole
        if whole:
            return whole * moment.first, c * (c != whole) + whole * (not moment.first)
        return (0, c) if self.contiguous else (c, 0)

    def _gathered(self, microbatches: int) -> int:
        """Bytes of parameters that are gathered in an optimizer step."""
        return self.c * self.trained

    def traffic(self, microbatches: int) -> Iterator[planning.Traffic]:
        sent = self.r * self.trained * (1 if self.stage.stage == 1 else microbatches)
        # Stages 1 and 2 give all ranks all of it (use_multi_rank_bucket_allreduce).
        kind: Any = "reduce-scatter" if self.stage.stage == 3 else "all-reduce"
        sums = planning.Traffic(
            collective=kind, bytes=sent, ranks=self.ranks, apart=self.apart, what="gradients"
        )
        if self.ranks > 1:
            size, kind = self._gathered(microbatches), "all-gather"
            yield from (sums, replace(sums, collective=kind, bytes=size, what="parameters"))

    def copies(self, microbatches: int) -> planning.Copies:
        """Gradients go down to the masters, updated weights up, or parameters whenever they are
        gathered. Sums in host memory go up and down in each micro-batch."""
        stage, far = self.stage.stage, self.stage.offload_param is not None
        if not (far or self.offloaded):
            return planning.Copies()
        adds = stage == 3 or (not self.low and microbatches > 1)
        times = (1 if stage == 1 else microbatches) * adds
        sums = SUMMED * self.part * times * self.offloaded
        read = self.share(self._gathered(microbatches)) if far else self.c * self.part
        return planning.Copies(up=read + sums, down=self.m * self.part + sums)


class Stage3Memory(ZeroMemory):
    """Every rank has a part of each parameter, and gathers whole ones to compute (zero/stage3.py,
    zero/partitioned_param_coordinator.py). Prefetching is a rate and no window: each module asks
    for another `prefetch_bucket_size` elements, so gathering runs ahead until `max_live_parameters`
    are whole, and what still is in backward is not gathered again."""

    def __init__(
        self, stage: Zero, procs: int, model: ModelShape, precision: Precision,
        optimizer: planning.OptimizerShape,
    ) -> None:  # fmt: skip
        super().__init__(stage, procs, model, precision, optimizer)
        # DeepSpeed's defaults: zero/config.py.
        asked = {name: value for name, value in vars(stage).items() if value is not None}
        limit = asked.get("param_persistence_threshold", 100_000)
        small = ((w.bytes(self.c), count) for w, count in model.counted() if w.elements <= limit)
        self.small = sum(size * count for size, count in small)
        """Bytes of parameters that stay whole between steps too."""
        self.ahead = self.c * asked.get("prefetch_bucket_size", 50_000_000)
        """Bytes that each module prefetches."""
        live = self.c * asked.get("max_live_parameters", 1_000_000_000)
        self.stays = min(self.every, live) if self.ahead else 0
        """Bytes that stay whole from forward to backward."""
        self.group = min(self.part, asked.get("sub_group_size", 1_000_000_000))
        """Elements that are updated at a time."""
        # While infinities are looked for, a gradient's magnitude and the answer are there.
        self.found = (SUMMED + 1) * self.part * (precision.compute == "fp16")
        params, pairs = stage.offload_param, stage.plus_plus
        self.near: Place = "host" if params else "device"
        self.on_disk = 0
        """Bytes of a rank's parts on the disk (swap_tensor/partitioned_param_swapper.py)."""
        if params is not None and params.device == "nvme":
            self.on_disk = self.share(self.every) - self.c * min(self.part, params.max_in_cpu)
        self.copied = (pairs.secondary_partition or 0) if pairs is not None else 0
        """Ranks that share a second copy of parameters (hpZ); 0 without one."""

    def _second(self, of: int) -> int:
        """A rank's bytes of the second copy of what was given up."""
        return -(-of // self.copied) if self.copied else 0

    def _lasting(self, event: str) -> Iterator[Item]:
        """While loading each trained parameter is whole once, to hook onto it; then small ones."""
        offload, params, buffers = self.stage.offload_optimizer, self.stage.offload_param, 0
        yield Item(planning.PARAMETERS, self.near, self.share(self.every) - self.on_disk)
        yield Item(planning.PARAMETERS, "disk", self.on_disk)
        yield Item(planning.GRADIENTS, self.masters[1], SUMMED * self.part)
        yield Item("gradients of masters", self.states_at, self.m * self.part * self.offloaded)
        if params and params.device == "nvme":
            buffers += self.c * params.buffer_count * params.buffer_size
        if offload and offload.device == "nvme":
            buffers += self.m * offload.buffer_count * self.group
        yield Item("swap buffers", "host", buffers)
        yield Item("reduce bucket", "device", self.r * self.bucket * self.contiguous)
        if event == "load":
            trained = (one.bytes(self.c) for one, _ in self.model.counted() if one.trained)
            made = max(self.small, self._second(self.every), *trained)
            yield Item("weights as they are made", "device", made)

    def _passing(self, moment: Moment, unit: UnitSizes) -> Iterator[Item]:
        """Whole parameters, and the buffer from which a fetch is copied: it has
        `prefetch_bucket_size` and a parameter more. In the step norms in fp64, also of gradients
        that come from the host, then one sub-group after another, then small parameters."""
        event, forward = moment.event, moment.event in ("gather", "forward")
        left = self.every if forward else unit.left
        # Given up since the update are frozen parameters always, and others after their use.
        waits = min(left, self.stays) * (moment.first and event != "step")
        given_up = self.every - (self.c * self.trained if event == "between" else waits)
        yield Item("second copy of parameters", self.near, self._second(given_up))
        if event == "step":
            update = SUMMED * self.group + self.optimizer.update(self.group)
            size = max(self.small, (SUMMED + 8) * self.share(self.largest))
            size = size if self.offloaded else max(size, self.found, update)
            yield Item(planning.UPDATE_TEMPORARIES, "device", size)
        elif self.ranks > 1 or self.near == "host":  # one rank's parts are whole there
            size = max(min(left, self.stays), unit.widest, self.small)
            if isinstance(moment.unit, int) and self.ahead and (forward or self.stays < self.every):
                size += min(self.ahead + unit.widest, max(left - self.small, 0))
            yield Item(planning.GATHERED, "device", self.small if event == "between" else size)

    def _gathered(self, microbatches: int) -> int:
        """In forward and backward; small ones only after the update."""
        large = self.every - self.small
        return (2 * large - min(large, self.stays)) * microbatches + self.small

    def traffic(self, microbatches: int) -> Iterator[planning.Traffic]:
        """With a second copy, all ranks gather for the first forward only."""
        for one in super().traffic(microbatches):
            if one.collective != "all-gather" or not self.copied:
                yield one
                continue
            within, what = one.bytes - self.every, "parameters from the second copy"
            yield replace(one, bytes=self.every)
            yield replace(one, bytes=within, ranks=self.copied, what=what)

    def copies(self, microbatches: int) -> planning.Copies:
        """Parameters on the disk are read as they are gathered, and written once, states once."""
        moved = self.share(self._gathered(microbatches)) + self.c * self.part
        disk = moved * self.on_disk / self.share(self.every)
        if self.states_at == "disk":
            disk += 2 * self.part * (2 * self.m + self.moments)
        return replace(super().copies(microbatches), disk=round(disk))
