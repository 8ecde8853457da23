"""Stage 3: every rank has a part of each parameter, and gathers whole ones to compute."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.planning.strategy import Gradients, Item
from stages.wrap.zero.memory.gathering import gathered, persistence
from stages.wrap.zero.memory.terms import (
    ACCUMULATED,
    NORM,
    Fill,
    Place,
    Setting,
    Weights,
    Where,
    bucket_fills,
)

SUB_GROUP = 1_000_000_000
"""DeepSpeed's default (zero/config.py)."""
OVERFLOW = ACCUMULATED + 1
"""Bytes of a gradient's element while infinities are looked for: its magnitude and the answer."""


class Sharded:
    """runtime/zero/stage3.py (DeepSpeedZeroOptimizer_Stage3)."""

    sums_at_once = True
    """Into memory that is among the states."""

    def __init__(self, setting: Setting, weights: Weights) -> None:
        self.setting, self.weights, self.stage = setting, weights, setting.stage
        self.part = setting.shares(weights.trained)
        self.offloaded = setting.stage.offload_optimizer is not None
        self.trained = sum(weights.trained)

    def states(self) -> Iterator[Item]:
        """What is there from loading to the end."""
        s, stage = self.setting, self.stage
        m, o, r = s.master_bytes, s.moment_bytes, s.reduce_bytes
        yield from self._parts()
        yield Item("masters", s.state_at, m * self.part, f"{m} N/W")
        yield Item("optimizer state", s.state_at, o * self.part, f"{o} N/W")
        gradients_at: Where = "host" if self.offloaded else "device"
        summed = ACCUMULATED * self.part
        yield Item("gradients of the parts", gradients_at, summed, "4 N/W")
        if self.offloaded:
            yield Item("masters' gradients", s.state_at, m * self.part, f"{m} N/W")
        if s.state_at == "disk" and stage.offload_optimizer is not None:
            count = stage.offload_optimizer.buffer_count
            size = m * count * self.sub_group
            yield Item("swap buffers", "host", size, f"{m} buffer_count sub-group")
        if stage.contiguous_gradients:
            yield Item("reduce bucket", "device", r * stage.reduce_bucket_size, f"{r} bucket")

    def _parts(self) -> Iterator[Item]:
        """Parts of the compute weights (swap_tensor/partitioned_param_swapper.py for the disk)."""
        c, offload = self.setting.compute_bytes, self.stage.offload_param
        frozen = self.setting.shares(self.weights.frozen)
        if offload is None or offload.device == "cpu":
            where: Where = "device" if offload is None else "host"
            yield Item("parts of parameters", where, c * self.part, f"{c} N/W")
            yield Item("parts of frozen parameters", where, c * frozen, f"{c} F/W")
            return
        near = min(self.part, offload.max_in_cpu)
        buffers = c * offload.buffer_count * offload.buffer_size
        yield Item("parts of parameters", "host", c * near, f"{c} min(N/W, max_in_cpu)")
        far = c * (self.part - near + frozen)
        yield Item("parts of parameters", "disk", far, f"{c} (N/W - max_in_cpu)")
        yield Item("buffers of parameters", "host", buffers, f"{c} buffer_count buffer_size")

    def persistent(self) -> Iterator[Item]:
        """Small parameters, whole between steps too."""
        limit, c = persistence(self.setting), self.setting.compute_bytes
        whole = sum(weight.elements for weight in self.weights.all if weight.elements <= limit)
        if self.setting.world > 1 or self.stage.offload_param is not None:
            yield Item("small parameters", "device", c * whole, f"{c} n <= persistence threshold")

    def load(self) -> Iterator[Item]:
        """One parameter after another is gathered, to hook onto its gradient; then small ones."""
        c = self.setting.compute_bytes
        yield from (item for item in self.states() if item.name != "optimizer state")
        largest = Item("a whole parameter", "device", c * max(self.weights.trained), f"{c} max(n)")
        yield max([largest, *self.persistent()], key=lambda item: item.bytes)

    def whole(self, place: Place, *, forward: bool) -> Iterator[Item]:
        """Gathered parameters and the buffers they are received in."""
        c = self.setting.compute_bytes
        most = gathered(self.setting, self.weights).get((forward, place), 0)
        yield Item(
            "parameters in use", "device", c * most, f"{c} bytes x what is gathered ahead of use"
        )

    def summed(self) -> Iterator[Item]:
        """Gradients of the micro-batches before are in the states."""
        return iter(())

    def backward(self, before: int, *, reduced: bool, accumulating: bool) -> Iterator[Item]:
        if not self.stage.contiguous_gradients:
            c, filled = self.setting.compute_bytes, min(before, self.stage.reduce_bucket_size)
            yield Item("gradients in the bucket", "device", c * filled, f"{c} bucket")

    def reductions(self) -> list[Fill]:
        """Of a backward."""
        return bucket_fills(self.weights.reversed, self.stage.reduce_bucket_size)

    def unreduced(self, fill: Fill) -> Iterator[Item]:
        """Gradients beside the bucket from before its reduction until after it."""
        c = self.setting.compute_bytes
        if fill.elements > self.stage.reduce_bucket_size:
            yield Item("gradient beyond a bucket", "device", c * fill.elements, f"{c} n")
        yield Item("gradient that waits", "device", c * fill.waiting, f"{c} n")

    def reduction(self, fill: Fill) -> Iterator[Item]:
        """While a bucket is reduced."""
        elements, c, r = fill.elements, self.setting.compute_bytes, self.setting.reduce_bytes
        loose = not self.stage.contiguous_gradients or elements > self.stage.reduce_bucket_size
        if loose and r != c:
            yield Item("bucket as sent", "device", r * elements, f"{r} filled")
        if fill.tensors > 1 or elements % self.setting.world:
            yield Item("flattened bucket", "device", r * elements, f"{r} filled")
        if r != ACCUMULATED:
            part = ACCUMULATED * self.setting.share(elements)
            yield Item("reduced gradients", "device", part, "4 filled/W")

    def step(self) -> Iterator[Item]:
        """On top of the states; small weights are whole again at the end."""
        ways = [*self.persistent(), *(self._on_host() if self.offloaded else self._on_device())]
        yield max(ways, key=lambda item: item.bytes)

    def _on_host(self) -> Iterator[Item]:
        """A gradient goes through the device, for its norm."""
        size = (ACCUMULATED + NORM) * self.setting.share(max(self.weights.trained))
        yield Item("a gradient and its norm", "device", size, "12 max(n)/W")

    def _on_device(self) -> Iterator[Item]:
        """Norms first, then a sub-group after another."""
        largest, m = self.setting.share(max(self.weights.trained)), self.setting.master_bytes
        each = ACCUMULATED + m * (m != ACCUMULATED)
        flat = each * self.sub_group
        yield Item("masters' gradients", "device", flat, f"{each} min(N/W, sub-group)")
        yield Item("a gradient's norm", "device", NORM * largest, "8 max(n)/W")
        if self.setting.compute == "fp16":
            size = OVERFLOW * self.part
            yield Item("check for overflow", "device", size, f"{OVERFLOW} N/W")

    def gradients(self) -> Gradients:
        c = self.setting.compute_bytes
        return Gradients(0, c) if self.stage.contiguous_gradients else Gradients(c, 0)

    @property
    def sub_group(self) -> int:
        """Elements of the largest one; it ends with the parameter that reaches the limit."""
        limit = SUB_GROUP if self.stage.sub_group_size is None else self.stage.sub_group_size
        most = filled = 0
        for elements in self.weights.trained:
            filled += self.setting.share(elements)
            most = max(most, filled)
            filled = 0 if filled >= limit else filled
        return most
