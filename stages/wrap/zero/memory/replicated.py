"""Stages 1 and 2: every rank has the compute weights whole, and its part of the states."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.planning.strategy import (
    GRADIENTS,
    IN_BACKWARD,
    PARAMETERS,
    UPDATE_TEMPORARIES,
    WHOLE_GRADIENTS,
    Copies,
    Gradients,
    Item,
    Moment,
    Traffic,
)
from stages.wrap.zero.memory import NORM, SUMMED, ZeroMemory

ENGINE_BUCKET = 500_000_000
"""Elements that stage 1 with bf16 reduces at a time, whatever the recipe says (engine.py,
MEMORY_OPT_ALLREDUCE_SIZE)."""


class Replicated(ZeroMemory):
    """zero/stage_1_and_2.py: gradients go through a bucket, each rank keeps its part of the sum;
    stage 1 keeps them whole until the step."""

    @property
    def _contiguous(self) -> bool:
        """Whether gradients are copied into a buffer as they come."""
        return self.stage.contiguous_gradients or self.offloaded

    @property
    def _sums(self) -> int:
        """Bytes of a part's gradients. Those in fp32 are of whole parameters, be a part smaller."""
        return SUMMED * (self.part if self.low else max(self.part, self.largest))

    def held(self, moment: Moment) -> Iterator[Item]:
        yield from super().held(moment)
        if moment.event not in ("load", "step", "between", *IN_BACKWARD) and not moment.first:
            yield from self.summed()

    def states(self) -> Iterator[Item]:
        c, copied = self.c, self.c * self.largest
        yield Item(PARAMETERS, "device", c * (self.trained + self.frozen), f"{c} (N + F)")
        yield from super().states()
        if self.offloaded:
            on_host = (self.m + c) * self.part + copied + self._sums * (not self.low)
            yield Item("gradients and updated weights", "host", on_host, f"{self.m + c} N/W")
            yield Item("gradient to copy", "device", copied, f"{c} max(n)")

    def loading(self, states: int) -> int:
        """Weights are made in the masters' dtype and cast, or copied into one buffer; then
        gradients of masters are there for a moment."""
        c, m = self.c, self.m
        made = max(m * self.trained + c * self.largest * (c != m), 2 * c * self.trained)
        return max(made + c * self.frozen, states + m * self.part * (not self.offloaded))

    def summed(self) -> Iterator[Item]:
        """Gradients of the micro-batches before."""
        if self.stage.stage == 1:
            yield Item(GRADIENTS, "device", SUMMED * self.trained, "4 N")
            yield self._bucket()
        elif self.low or not self.offloaded:
            yield Item(GRADIENTS, "device", self._sums, "4 N/W")

    def _bucket(self) -> Item:
        """Allocated whole, however small the model."""
        each = SUMMED if self.stage.stage == 1 else self.c
        each *= self._contiguous * (2 if self.stage.overlap_comm else 1)
        size = each * self.stage.reduce_bucket_size
        return Item("reduce bucket", "device", size, f"{each} bucket")

    def backward(self, moment: Moment) -> Iterator[Item]:
        unit, bucket = self.units[moment.unit], self.stage.reduce_bucket_size
        yield self._bucket()
        if self.stage.stage == 1:
            computed = unit.before if moment.first else self.trained
            yield Item(GRADIENTS, "device", SUMMED * computed, "4 N so far")
            return
        times = (moment.event == "reduce" or unit.before > bucket) + (not moment.first)
        # New fp32 ones are added to those of the micro-batches before when all are there.
        for _ in range(min(times, 1) if self.low else times):
            yield from self.summed()
        kept = min(unit.beyond, self.part) * self.low
        if not self._contiguous:
            kept = min(unit.before, self.part) + min(unit.before, bucket)
        yield Item(WHOLE_GRADIENTS, "device", self.c * kept, f"{self.c} n > bucket, of the part")
        size = max((self._reduction(*fill) for fill in self.fills(moment)), default=0)
        yield Item("reduction", "device", size, f"{self.c} (filled + n), {self.r} filled as sent")

    def _reduction(self, filled: int, waiting: int) -> int:
        """A bucket is flattened, unless it is one slice of one rank's, and cast to the dtype it
        travels in (allreduce_bucket). Bytes."""
        c, r = self.c, self.r
        alone = self._contiguous and filled > self.stage.reduce_bucket_size
        flat = c * filled * (not alone or filled > self.part)
        sums = SUMMED * min(self.largest, self.part) * (self.low and r != SUMMED)
        return c * (filled * alone + waiting) + flat + r * filled * (r != c) + sums

    def step(self) -> Iterator[Item]:
        """A part's norms and update; at stage 1, or first the reduction of whole gradients."""
        norm = NORM * min(self.largest, self.part)
        gradients = self.c * self.largest if self.offloaded and not self.low else self._sums
        copied = not self.offloaded and not (self.low and self.m == SUMMED)
        taken = max(norm, self.m * self.part * copied + self.taken(self.part))
        if self.stage.stage == 1:
            filled = min(self.stage.reduce_bucket_size, self.trained) * self._contiguous
            flat = max(SUMMED * filled * self.low, norm * self.offloaded)
            reduced = self._bucket().bytes + SUMMED * (self.trained - filled) + flat
            gradients, taken = max((gradients, taken), (self._sums, reduced), key=sum)
        yield Item(GRADIENTS, "device", gradients, "4 N/W")
        formula = f"8 max(n) of norms, {self.m} N/W; stage 1 reduces 4 N and a bucket"
        yield Item(UPDATE_TEMPORARIES, "device", taken, formula)

    def gradients(self, moment: Moment) -> Gradients:
        if self.stage.stage == 2:
            return Gradients(0, self.c) if self._contiguous else Gradients(self.c, 0)
        # A tied one is copied when it has been added to the head's.
        added = self.model.tied and moment.unit == "embeddings"
        passing = self.c * (self.low and not added)
        return Gradients(SUMMED, passing) if moment.first else Gradients(0, SUMMED + passing)

    def traffic(self, microbatches: int) -> Iterator[Traffic]:
        sent = self.r * self.trained * (1 if self.stage.stage == 1 else microbatches)
        w, whole = self.ranks, self.c * self.trained
        if w > 1:
            # All ranks are given all of it (use_multi_rank_bucket_allreduce).
            yield Traffic(collective="all-reduce", bytes=sent, ranks=w, what="gradients")
            yield Traffic(collective="all-gather", bytes=whole, ranks=w, what="parameters")

    def copies(self, microbatches: int) -> Copies:
        """Summed gradients go down once a step, updated weights up (copy_grads_in_partition); fp32
        ones are summed in host memory, in each micro-batch but the first."""
        if not self.offloaded:
            return Copies()
        reductions = 1 if self.stage.stage == 1 else microbatches
        sums = self._sums * (not self.low and microbatches > 1)
        up, down = sums * max(reductions - 1, 1), sums * reductions
        return Copies(up=self.c * self.part + up, down=self.m * self.part + down)


class Accumulated(Replicated):
    """Stage 1 of bf16 weights, not offloaded (bf16_optimizer.py): gradients are whole and in bf16,
    their sums whole and in fp32 all the time. There is no bucket."""

    def states(self) -> Iterator[Item]:
        yield from super().states()
        yield Item("summed gradients", "device", SUMMED * self.trained, "4 N")

    def loading(self, states: int) -> int:
        return states

    def summed(self) -> Iterator[Item]:
        yield Item(GRADIENTS, "device", self.c * self.trained, f"{self.c} N")

    def backward(self, moment: Moment) -> Iterator[Item]:
        """After it, gradients are added to those in fp32 one by one."""
        each, ended = self.c + SUMMED, (moment.event, moment.unit) == ("reduce", "embeddings")
        there = moment.first and not ended
        computed = self.units[moment.unit].before if there else self.trained
        yield Item(GRADIENTS, "device", self.c * computed, f"{self.c} N so far")
        yield Item("gradient to add", "device", each * self.largest * ended, f"{each} max(n)")

    def step(self) -> Iterator[Item]:
        yield from self.summed()
        flat = SUMMED * self.trained * (self.trained <= ENGINE_BUCKET)
        sent = self.r * self.trained * (self.r != SUMMED)
        size = max(flat + sent, self.taken(self.part))
        yield Item(UPDATE_TEMPORARIES, "device", size, f"4 N flattened, {self.r} N as sent")

    def gradients(self, moment: Moment) -> Gradients:
        return Gradients(self.c, 0) if moment.first else Gradients(0, self.c)
