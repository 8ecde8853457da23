"""The planner of `wrap.zero`, and the memory of stage 3."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

from pipeline import Precision
from pipeline.planning import (
    GATHERED,
    GRADIENTS,
    PARAMETERS,
    Copies,
    Division,
    Item,
    Moment,
    OptimizerShape,
    Place,
    Planner,
    Preset,
    Presets,
    Profile,
    Tier,
    Topology,
    Traffic,
)
from stages.wrap.axes import caveats, required
from stages.wrap.model_parts import model_parts
from stages.wrap.zero.memory import SUMMED, Amounts, ZeroMemory
from stages.wrap.zero.stage import Zero

STATES = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
BOTH = {**STATES, "offload_param": {"device": "cpu"}}
DISK = {**BOTH, "offload_optimizer": {"device": "nvme", "path": "/nvme"}}
PRESETS: dict[str, tuple[int, dict[str, object], str]] = {
    "zero1": (0, {"stage": 1}, "shards of optimizer state"),
    "zero2": (0, {"stage": 2}, "shards of optimizer state and gradients"),
    "zero3": (0, {"stage": 3}, "shards of everything"),
    "zero3-offload": (Tier.OFFLOADED, STATES, "shards, optimizer state in host memory"),
    "zero3-offload-all": (Tier.MORE_OFFLOADED, BOTH, "shards, state and parameters in host memory"),
    "zero3-nvme": (Tier.OFFLOADED_TO_DISK, DISK, "state on a disk (path), parameters on the host"),
}


class Stage3Memory(ZeroMemory):
    """Every rank has a part of each parameter, and gathers whole ones to compute (zero/stage3.py,
    zero/partitioned_param_coordinator.py). Prefetching is a rate and no window: each module asks
    for another `prefetch_bucket_size` elements, so gathering runs ahead until `max_live_parameters`
    are whole, and what still is in backward is not gathered again."""

    def _setting(self, name: str, default: int) -> int:
        """A field of the stage, or DeepSpeed's default (zero/config.py)."""
        given = getattr(self.stage, name)
        return default if given is None else given

    def beside(self) -> Iterator[Item]:
        c, m, stage, offload = self.c, self.m, self.stage, self.stage.offload_optimizer
        near: Place = "host" if stage.offload_param else "device"
        yield Item(PARAMETERS, near, self.share(self.every) - self._on_disk)
        yield Item(PARAMETERS, "disk", self._on_disk)
        yield Item(GRADIENTS, self.masters[1], SUMMED * self.part)
        buffers = 0
        if stage.offload_param and stage.offload_param.device == "nvme":
            buffers += c * stage.offload_param.buffer_count * stage.offload_param.buffer_size
        if offload:
            yield Item("gradients of masters", self.states_at, m * self.part)
            buffers += m * offload.buffer_count * self._group * (offload.device == "nvme")
        yield Item("swap buffers", "host", buffers)
        size = self.r * self.bucket * self.contiguous
        yield Item("reduce bucket", "device", size)

    @property
    def _on_disk(self) -> int:
        """Bytes of a rank's parts on the disk (swap_tensor/partitioned_param_swapper.py)."""
        params = self.stage.offload_param
        if params is None or params.device != "nvme":
            return 0
        return self.share(self.every) - self.c * min(self.part, params.max_in_cpu)

    @property
    def _group(self) -> int:
        """Elements that are updated at a time."""
        return min(self.part, self._setting("sub_group_size", 1_000_000_000))

    def loading(self) -> int:
        """Each trained parameter is whole once more, to hook onto its gradient; then small ones
        are. A second copy is there at first, until masters are loaded."""
        trained = (one.bytes(self.c) for one, _ in self.model.counted() if one.trained)
        widest = max(trained, default=0)
        return max(self._small, widest, self._second_copy(self.every))

    @functools.cached_property
    def _small(self) -> int:
        """Bytes of parameters that stay whole between steps too."""
        limit, counted = self._setting("param_persistence_threshold", 100_000), self.model.counted()
        return sum(one.bytes(self.c) * count for one, count in counted if one.elements <= limit)

    @functools.cached_property
    def _ahead(self) -> int:
        """Bytes that each module prefetches."""
        return self.c * self._setting("prefetch_bucket_size", 50_000_000)

    @functools.cached_property
    def _stays(self) -> int:
        """Bytes that stay whole from forward to backward."""
        limit = self.c * self._setting("max_live_parameters", 1_000_000_000)
        return min(self.every, limit) if self._ahead else 0

    def passing(self, moment: Moment) -> Iterator[Item]:
        """Whole parameters, and the buffer from which a fetch is copied: it has
        `prefetch_bucket_size` and a parameter more."""
        unit, forward = self.units[moment.unit], moment.event in ("gather", "forward")
        left = self.every if forward else unit.left
        near: Place = "host" if self.stage.offload_param else "device"
        # Given up since the update are frozen parameters always, and others once they were computed
        # with and `left` does not keep them.
        given_up = self.every - self.c * self.trained
        if moment.event != "between":
            waits = moment.first and moment.event != "step"
            given_up = self.every - min(left, self._stays) * waits
        yield Item("second copy of parameters", near, self._second_copy(given_up))
        whole = max(min(left, self._stays), unit.widest, self._small)
        if isinstance(moment.unit, int) and self._ahead and (forward or self._stays < self.every):
            whole += min(self._ahead + unit.widest, max(left - self._small, 0))
        # One rank's parts are whole, unless they are elsewhere.
        if moment.event != "step" and (self.ranks > 1 or self.stage.offload_param):
            size = self._small if moment.event == "between" else whole
            yield Item(GATHERED, "device", size)

    def _second_copy(self, of: int) -> int:
        """A rank's bytes of the copy that groups of ranks share (hpZ), of what was given up."""
        group = self._group_of_second_copy
        return -(-of // group) if group else 0

    @property
    def _group_of_second_copy(self) -> int:
        """Ranks that share it; 0 without one."""
        asked = self.stage.plus_plus
        return (asked.secondary_partition or 0) if asked is not None else 0

    def flattened(self, unit: Amounts) -> int:
        return self.r

    def kept(self, moment: Moment) -> int:
        return 0 if self.contiguous else min(self.units[moment.unit].before, self.bucket)

    def step(self) -> int:
        """Norms in fp64, also of gradients that come from the host, then a sub-group after another;
        small parameters are whole again at the end."""
        size = max(self._small, (SUMMED + 8) * self.share(self.largest))
        if self.offloaded:
            return size
        # While infinities are looked for, a gradient's magnitude and the answer are there.
        found = (SUMMED + 1) * self.part * (self.compute == "fp16")
        updated = SUMMED * self._group + self.optimizer.update(self._group)
        return max(size, found, updated)

    def gathered(self, microbatches: int) -> int:
        """In forward and backward; small ones after the update alone."""
        large = self.every - self._small
        return (2 * large - min(large, self._stays)) * microbatches + self._small

    def traffic(self, microbatches: int) -> Iterator[Traffic]:
        """With a second copy, all ranks gather for the first forward alone."""
        group = self._group_of_second_copy
        for one in super().traffic(microbatches):
            if one.collective != "all-gather" or not group:
                yield one
                continue
            within = one.bytes - self.every
            yield replace(one, bytes=self.every)
            yield replace(one, bytes=within, ranks=group, what="parameters from the second copy")

    def copies(self, microbatches: int) -> Copies:
        """Parameters on the disk are read as they are gathered, and written once, states once."""
        moved = self.share(self.gathered(microbatches)) + self.c * self.part
        disk = moved * self._on_disk / self.share(self.every)
        if self.states_at == "disk":
            disk += 2 * self.part * (2 * self.m + self.moments)
        return replace(super().copies(microbatches), disk=round(disk))


class ZeroPlanner(Planner[Zero]):
    """Planner of `wrap.zero`: its presets, and the memory of each rank."""

    @classmethod
    def presets(cls) -> Presets:
        return {
            name: Preset(order=order, what=what, fields=fields)
            for name, (order, fields, what) in PRESETS.items()
        }

    def division(self, topology: Topology) -> Division | None:
        return model_parts(self.stage, topology)

    def forecast(
        self, topology: Topology, profile: Profile, precision: Precision, optimizer: OptimizerShape
    ) -> ZeroMemory:
        share = Stage3Memory if self.stage.stage == 3 else ZeroMemory
        tensor = required(self.stage, topology.ranks).tensor
        groups = {"ranks": topology.ranks // tensor, "apart": tensor}
        memory = share(self.stage, profile.model, precision, optimizer, **groups)
        memory.caveats = caveats(self.stage)
        return memory
