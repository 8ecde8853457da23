"""Stage 3: every rank has a part of each parameter, and gathers whole ones to compute."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from pipeline.planning.strategy import (
    GATHERED,
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

DEFAULTS = {
    "prefetch_bucket_size": 50_000_000,
    "max_live_parameters": 1_000_000_000,
    "max_reuse_distance": 1_000_000_000,
    "param_persistence_threshold": 100_000,
    "sub_group_size": 1_000_000_000,
}
"""DeepSpeed's (zero/config.py)."""


class Sharded(ZeroMemory):
    """zero/stage3.py, zero/partitioned_param_coordinator.py.

    Prefetching is a rate and no window: each module asks for another `prefetch_bucket_size`
    elements, so gathering runs ahead until `max_live_parameters` are whole, and what is still
    whole when backward comes is not gathered again.
    """

    def _setting(self, name: str) -> int:
        given = getattr(self.stage, name)
        return DEFAULTS[name] if given is None else given

    def held(self, moment: Moment) -> Iterator[Item]:
        yield from super().held(moment)
        # One rank's parts are whole, unless they are elsewhere.
        apart = self.ranks > 1 or self.stage.offload_param is not None
        if apart and moment.event not in ("load", "step"):
            size = self.c * (self._small if moment.event == "between" else self._whole(moment))
            formula = f"{self.c} (max_live_parameters + prefetch_bucket_size + n)"
            yield Item(GATHERED, "device", size, formula)

    def states(self) -> Iterator[Item]:
        m, stage, offload = self.m, self.stage, self.stage.offload_optimizer
        yield from self._parts()
        yield from super().states()
        yield Item(GRADIENTS, self.masters[1], SUMMED * self.part, "4 N/W")
        if offload is not None:
            yield Item("gradients of masters", self.states_at, m * self.part, f"{m} N/W")
            if offload.device == "nvme":
                size = m * offload.buffer_count * self._sub_group
                yield Item("swap buffers", "host", size, f"{m} buffer_count sub-group")
        size = self.r * stage.reduce_bucket_size * stage.contiguous_gradients
        yield Item("reduce bucket", "device", size, f"{self.r} bucket")

    def _parts(self) -> Iterator[Item]:
        """Parts of the compute weights (swap_tensor/partitioned_param_swapper.py for the disk)."""
        c, offload, every = self.c, self.stage.offload_param, self.part + self.share(self.frozen)
        if offload is None or offload.device == "cpu":
            yield Item(PARAMETERS, "host" if offload else "device", c * every, f"{c} (N + F)/W")
            return
        near = min(self.part, offload.max_in_cpu)
        yield Item(PARAMETERS, "host", c * near, f"{c} min(N/W, max_in_cpu)")
        yield Item(PARAMETERS, "disk", c * (every - near), f"{c} (N + F)/W - max_in_cpu")
        buffers = c * offload.buffer_count * offload.buffer_size
        yield Item("swap buffers", "host", buffers, f"{c} buffer_count buffer_size")

    @property
    def _sub_group(self) -> int:
        """Elements updated at a time; a group ends with the parameter that reaches the limit."""
        return min(self.part, self._setting("sub_group_size") + self.share(self.largest))

    def loading(self, states: int) -> int:
        """Each parameter is whole once more, to hook onto its gradient; then small ones are."""
        return states + self.c * max(self.largest, self._small * (self.ranks > 1))

    @functools.cached_property
    def _small(self) -> int:
        """Elements of parameters that stay whole between steps too."""
        limit = self._setting("param_persistence_threshold")
        counted = ((self.size(weight), count) for weight, count in self.model.counted())
        return sum(size * count for size, count in counted if size <= limit)

    @functools.cached_property
    def _stays(self) -> int:
        """Elements that stay whole from forward to backward. Without prefetching a parameter is as
        far from itself as what lies behind it, there and back."""
        limit = self._setting("max_live_parameters")
        if not self._setting("prefetch_bucket_size"):
            limit = min(limit, self._setting("max_reuse_distance") // 2)
        return min(self.trained + self.frozen, limit)

    def _whole(self, moment: Moment) -> int:
        """Elements that are whole, and those in the buffer from which a fetch is copied: it has
        `prefetch_bucket_size` and a parameter more, at the end of forward the head."""
        every, ahead = self.trained + self.frozen, self._setting("prefetch_bucket_size")
        unit, backward = self.units[moment.unit], moment.event in IN_BACKWARD
        left = every if moment.event in ("gather", "forward") else unit.left
        whole = max(min(left, self._stays), unit.widest, self._small)
        inside = isinstance(moment.unit, int) and self.ranks > 1 and ahead > 0
        if not inside or (backward and self._stays == every):
            return whole
        last = moment.unit == len(self.model.blocks) - 1 and not backward
        fetched = max(ahead + unit.widest, self.units["head"].widest * last)
        return whole + min(fetched, max(left - self._small, 0))

    def backward(self, moment: Moment) -> Iterator[Item]:
        unit, c, bucket = self.units[moment.unit], self.c, self.stage.reduce_bucket_size
        filled = min(unit.before, bucket) * (not self.stage.contiguous_gradients)
        yield Item(WHOLE_GRADIENTS, "device", c * filled, f"{c} bucket")
        size = max((self._reduction(*fill) for fill in self.fills(moment)), default=0)
        yield Item("reduction", "device", size, f"{self.r} filled as sent, {c} n")

    def _reduction(self, filled: int, waiting: int) -> int:
        """A bucket is flattened in the dtype it travels in, and comes back as a part. Bytes."""
        alone = filled > self.stage.reduce_bucket_size
        flat = self.r * filled * (not alone or self.r != self.c)
        part = SUMMED * self.share(filled) * (self.r != SUMMED)
        return self.c * (filled * alone + waiting) + flat + part

    def step(self) -> Iterator[Item]:
        """Norms, then a sub-group after another; small parameters are whole again at the end. An
        offloaded gradient goes through the device for its norm."""
        m, largest, group = self.m, self.share(self.largest), self._sub_group
        size = max(self.c * self._small * (self.ranks > 1), NORM * largest)
        if self.offloaded:
            size = max(size, (SUMMED + NORM) * largest)
        else:
            # While infinities are looked for, a gradient's magnitude and the answer are there.
            found = (SUMMED + 1) * self.part * self.scaled
            each = SUMMED + m * (m != SUMMED)
            size = max(size, found, each * group + self.taken(group))
        yield Item(UPDATE_TEMPORARIES, "device", size, "4 min(N/W, sub-group), 8 max(n)/W of norms")

    def gradients(self, moment: Moment) -> Gradients:
        return Gradients(0, self.c) if self.stage.contiguous_gradients else Gradients(self.c, 0)

    def traffic(self, microbatches: int) -> Iterator[Traffic]:
        w, sent = self.ranks, self.r * self.trained * microbatches
        moved = self.c * self._gathered(microbatches)
        if w > 1:
            yield Traffic(collective="reduce-scatter", bytes=sent, ranks=w, what="gradients")
            yield Traffic(collective="all-gather", bytes=moved, ranks=w, what="parameters")

    def _gathered(self, microbatches: int) -> int:
        """Elements, with padding, in forward and backward; small ones after the update alone."""
        limit, large, small = self._setting("param_persistence_threshold"), 0, 0
        for weight, count in self.model.counted():
            padded = self.share(self.size(weight)) * self.ranks * count
            is_small = self.size(weight) <= limit
            large, small = large + padded * (not is_small), small + padded * is_small
        return (2 * large - min(large, self._stays)) * microbatches + small

    def copies(self, microbatches: int) -> Copies:
        """Gradients in host memory are summed on the device, each micro-batch there and back; then
        they go down to the masters (partition_grads). Parameters there are read when they are
        gathered, and updated once."""
        c, m, part = self.c, self.m, self.part
        optimizer, params = self.stage.offload_optimizer, self.stage.offload_param
        if optimizer is None and params is None:
            return Copies()
        up, down, disk = c * part, m * part, 0.0
        if params is not None:
            up = c * self.share(self._gathered(microbatches))
        if params is not None and params.device == "nvme":
            every, near = part + self.share(self.frozen), min(part, params.max_in_cpu)
            disk = up * (every - near) / every + c * (part - near)
        if optimizer is not None:
            up, down = (moved + SUMMED * part * microbatches for moved in (up, down))
            # Masters, their gradients and moments are read and written.
            disk += 2 * part * (2 * m + self.moments) * (optimizer.device == "nvme")
        return Copies(up=up, down=down, disk=round(disk))
