"""Stages 1 and 2: every rank has the compute weights whole, and a part of masters and moments."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator

from pipeline.planning.strategy import Gradients, Item
from stages.wrap.zero.memory.terms import (
    ACCUMULATED,
    NORM,
    Fill,
    Place,
    Setting,
    Weights,
    bucket_fills,
)

ENGINE_BUCKET = 500_000_000
"""Elements that stage 1 with bf16 reduces at a time, whatever the recipe says (engine.py,
MEMORY_OPT_ALLREDUCE_SIZE)."""


class Replicated:
    """runtime/zero/stage_1_and_2.py (DeepSpeedZeroOptimizer)."""

    def __init__(self, setting: Setting, weights: Weights) -> None:
        self.setting, self.weights, self.stage = setting, weights, setting.stage
        self.trained = sum(weights.trained)
        self.part = setting.share(self.trained)
        self.largest = max(weights.trained)
        self.offloaded = setting.stage.offload_optimizer is not None
        self.separate = setting.compute_bytes != ACCUMULATED
        self.sums_at_once = self.separate
        """Whether a reduction's result goes into the part's memory, which else is made after the
        first reduction."""
        self.first = setting.stage.stage == 1
        self.staging = ACCUMULATED if self.separate and self.first else setting.compute_bytes

    def states(self) -> Iterator[Item]:
        """What is there from loading to the end."""
        s = self.setting
        c, m, o = s.compute_bytes, s.master_bytes, s.moment_bytes
        yield Item("parameters", "device", c * self.trained, f"{c} N")
        if self.weights.frozen:
            yield Item("frozen parameters", "device", c * sum(self.weights.frozen), f"{c} F")
        yield Item("masters", s.state_at, m * self.part, f"{m} N/W")
        yield Item("optimizer state", s.state_at, o * self.part, f"{o} N/W")
        if self.offloaded:
            yield Item("masters' gradients", "host", m * self.part, f"{m} N/W")
            yield Item("updated weights", "host", c * self.part, f"{c} N/W")
            yield Item("gradient to copy", "host", c * self.largest, f"{c} max(n)")
            yield Item("gradient to copy", "device", c * self.largest, f"{c} max(n)")
            if not self.separate:
                whole = c * self.in_part
                yield Item("gradients of the part", "host", whole, f"{c} N/W, whole parameters")

    def load(self) -> Iterator[Item]:
        """While weights are made in the masters' dtype, cast, and copied into one buffer."""
        s = self.setting
        c, m, frozen = s.compute_bytes, s.master_bytes, sum(self.weights.frozen)
        made = m * self.trained + c * self.largest * (c != m)
        flat = 2 * c * self.trained
        most = max(made + c * frozen, flat + c * frozen, self.loaded())
        yield Item("parameters", "device", most, f"max({m} N, 2 {c} N, states but moments)")
        yield from (i for i in self.states() if i.where != "device" and i.name != "optimizer state")

    def loaded(self) -> int:
        """Bytes on the device: for a moment gradients of the masters are there, no moments yet."""
        s = self.setting
        states = sum(item.bytes for item in self.states() if item.where == "device")
        return states + (s.master_bytes - s.moment_bytes) * self.part * (not self.offloaded)

    def summed(self) -> Iterator[Item]:
        """Gradients of the micro-batches before, and the buffer for their reduction."""
        if self.first:
            each = self.gradients().kept
            yield Item("gradients", "device", each * self.trained, f"{each} N")
            yield from self.bucket()
        elif self.separate:
            yield Item("gradients of the part", "device", ACCUMULATED * self.part, "4 N/W")
        elif not self.offloaded:
            yield Item(
                "gradients of the part", "device", 4 * self.in_part, "4 N/W, whole parameters"
            )

    def bucket(self) -> Iterator[Item]:
        """Allocated whole, however small the model."""
        if self.contiguous:
            each = self.staging * (2 if self.overlaps else 1)
            size = each * self.stage.reduce_bucket_size
            yield Item("reduce bucket", "device", size, f"{each} bucket")

    def whole(self, place: Place, *, forward: bool) -> Iterator[Item]:
        """Nothing is gathered."""
        return iter(())

    def persistent(self) -> Iterator[Item]:
        """Nor stays so."""
        return iter(())

    def backward(self, before: int, *, reduced: bool, accumulating: bool) -> Iterator[Item]:
        """While gradients are computed; `before` elements of them were already."""
        c = self.setting.compute_bytes
        yield from self.bucket()
        if self.first:
            each = self.gradients().kept
            before = self.trained if accumulating else before
            yield Item("gradients so far", "device", each * before, f"{each} of each element")
            return
        if reduced or accumulating:
            yield from self.summed()
        if reduced and accumulating and not self.separate and not self.offloaded:
            yield from self.summed()  # the new ones are added when all are there
        if self.separate and self.contiguous:
            own = c * min(self.beyond(before), self.in_part)
            yield Item("gradients beyond a bucket, of the part", "device", own, f"{c} n > bucket")
        if not self.contiguous:
            part, filled = min(before, self.in_part), min(before, self.stage.reduce_bucket_size)
            yield Item("gradients of the part, as computed", "device", c * part, f"{c} N/W")
            yield Item("gradients in the bucket", "device", c * filled, f"{c} bucket")

    def beyond(self, before: int) -> int:
        """Elements of the first `before` gradients that were too large for the bucket: those of a
        rank's part stay until the end of backward, although they were reduced."""
        sizes = [elements for _, elements in self.weights.reversed]
        known = itertools.takewhile(
            lambda pair: pair[1] <= before, zip(sizes, itertools.accumulate(sizes), strict=True)
        )
        return sum(size for size, _ in known if size > self.stage.reduce_bucket_size)

    def reductions(self) -> list[Fill]:
        """Of a backward; stage 1 reduces in the step."""
        if self.first:
            return []
        return bucket_fills(self.weights.reversed, self.stage.reduce_bucket_size)

    def unreduced(self, fill: Fill) -> Iterator[Item]:
        """Gradients beside the bucket from before its reduction until after it."""
        c = self.setting.compute_bytes
        if self.contiguous and fill.elements > self.stage.reduce_bucket_size:
            yield Item("gradient beyond a bucket", "device", c * fill.elements, f"{c} n")
        yield Item("gradient that waits", "device", c * fill.waiting, f"{c} n")

    def reduction(self, fill: Fill) -> Iterator[Item]:
        """While a bucket is reduced: allreduce_bucket flattens its slices, one by rank, and casts
        them to the dtype they travel in."""
        c, r, elements = self.setting.compute_bytes, self.setting.reduce_bytes, fill.elements
        if self.sliced(fill):
            yield Item("flattened bucket", "device", c * elements, f"{c} filled")
        if r != c:
            yield Item("bucket as sent", "device", r * elements, f"{r} filled")
        if self.separate and r != ACCUMULATED:
            size = ACCUMULATED * min(self.largest, self.part)
            yield Item("a gradient in fp32", "device", size, "4 max(n)")

    def sliced(self, fill: Fill) -> bool:
        """Whether there are several slices: of several gradients, or of one of several ranks."""
        begin = sum(elements for _, elements in self.weights.reversed[fill.after :])
        return fill.tensors > 1 or self.setting.splits(begin, fill.elements, self.trained)

    def step(self) -> Iterator[Item]:
        """On top of the states: the reduction of stage 1, or what comes after it."""
        reducing = list(self.reduced_in_step()) if self.first else []
        yield from max(
            reducing, list(self.updated()), key=lambda items: sum(i.bytes for i in items)
        )

    def updated(self) -> Iterator[Item]:
        """From the norm to the update."""
        m, c = self.setting.master_bytes, self.setting.compute_bytes
        if self.separate:
            yield Item("gradients of the part", "device", ACCUMULATED * self.part, "4 N/W")
        elif self.offloaded:
            yield Item("a gradient back from the host", "device", c * self.largest, f"{c} max(n)")
        else:
            yield Item("gradients of the part", "device", c * self.in_part, f"{c} N/W")
        copied = not self.separate or m != ACCUMULATED
        flat = m * self.part * (copied and not self.offloaded)
        yield max(
            Item("masters' gradients", "device", flat, f"{m} N/W"),
            Item("a gradient's norm", "device", self.norm, "8 max(n)"),
            key=lambda item: item.bytes,
        )

    def reduced_in_step(self) -> Iterator[Item]:
        """Whole gradients go through the bucket into the part's memory."""
        fills = bucket_fills(self.weights.reversed[::-1], self.stage.reduce_bucket_size)
        each, first = self.gradients().kept, fills[0].elements if self.contiguous else 0
        yield from self.bucket()
        yield Item("gradients", "device", each * (self.trained - first), f"{each} (N - filled)")
        part = ACCUMULATED * self.part if self.separate else each * self.in_part
        yield Item("gradients of the part", "device", part, f"{each} N/W")
        flat = Item("flattened bucket", "device", each * first * self.separate, f"{each} filled")
        norm = Item("a gradient's norm", "device", self.norm * self.offloaded, "8 max(n)")
        yield max(flat, norm, key=lambda item: item.bytes)

    @property
    def norm(self) -> int:
        """Of the largest piece of a gradient that a rank has."""
        return NORM * min(self.largest, self.part)

    def gradients(self) -> Gradients:
        """Into the bucket at once, or whole until the step."""
        c = self.setting.compute_bytes
        if self.first:
            return Gradients(self.staging, c if self.separate else 0)
        return Gradients(0, c) if self.contiguous else Gradients(c, 0)

    @property
    def contiguous(self) -> bool:
        return self.stage.contiguous_gradients or self.offloaded

    @property
    def overlaps(self) -> bool:
        return bool(self.stage.overlap_comm)

    @property
    def in_part(self) -> int:
        """Elements of the parameters of which a rank has a part, of the rank that has most."""
        return in_part(self.weights.trained, self.part)


@functools.cache
def in_part(sizes: tuple[int, ...], part: int) -> int:
    """Elements of the parameters of which a rank has a part of so many elements; of the rank that
    has most."""
    inside: Counter[int] = Counter()
    begin = 0
    for size in sizes:
        for rank in range(begin // part, (begin + size - 1) // part + 1):
            inside[rank] += size
        begin += size
    return max(inside.values())


class Accumulated(Replicated):
    """Stage 1 of bf16 weights, not offloaded: runtime/bf16_optimizer.py. Summed gradients are whole
    and in fp32, all the time."""

    def states(self) -> Iterator[Item]:
        yield from super().states()
        yield Item("summed gradients", "device", ACCUMULATED * self.trained, "4 N")

    def loaded(self) -> int:
        return sum(item.bytes for item in self.states() if item.name != "optimizer state")

    def summed(self) -> Iterator[Item]:
        c = self.setting.compute_bytes
        yield Item("gradients", "device", c * self.trained, f"{c} N")

    def backward(self, before: int, *, reduced: bool, accumulating: bool) -> Iterator[Item]:
        c = self.setting.compute_bytes
        before = self.trained if accumulating else before
        yield Item("gradients so far", "device", c * before, f"{c} of each element")

    def reductions(self) -> list[Fill]:
        """After backward, gradients are added to those in fp32."""
        count = len(self.weights.reversed)
        return [Fill("embeddings", self.trained, 0, count, count)]

    def unreduced(self, fill: Fill) -> Iterator[Item]:
        return iter(())

    def reduction(self, fill: Fill) -> Iterator[Item]:
        c = self.setting.compute_bytes
        last = c * self.weights.reversed[-1][1]
        yield Item("the last gradient", "device", last, f"{c} n")
        yield Item("a gradient in fp32", "device", ACCUMULATED * self.largest, "4 max(n)")

    def step(self) -> Iterator[Item]:
        yield from self.summed()
        flat = ACCUMULATED if self.setting.groups > 1 and self.trained <= ENGINE_BUCKET else 0
        sent = self.setting.reduce_bytes
        if flat:
            yield Item("flattened gradients", "device", flat * self.trained, "4 N")
        if sent != ACCUMULATED:
            yield Item("gradients as sent", "device", sent * self.trained, f"{sent} N")

    def gradients(self) -> Gradients:
        return Gradients(self.setting.compute_bytes, 0)
