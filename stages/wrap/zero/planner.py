"""What planning asks of `wrap.zero`: the closed form of `memory` as a strategy's share."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.artifacts import Precision
from pipeline.planning.planner import Planner, Tier
from pipeline.planning.profile import Profile
from pipeline.planning.shapes import ModelShape, OptimizerShape
from pipeline.planning.shapes import Weight as Declared
from pipeline.planning.strategy import Copies, Gradients, Item, Moment, StrategyMemory, Traffic
from pipeline.planning.timeline import Place
from pipeline.planning.topology import Topology
from pipeline.stage import Preset, Presets
from stages.wrap.zero import memory
from stages.wrap.zero.copies import copies
from stages.wrap.zero.kernels import uses_deepspeed_kernel
from stages.wrap.zero.memory import Setting, Weight, Weights
from stages.wrap.zero.stage import Zero

KERNEL_MOMENTS = 8
"""Bytes of an element's moments in DeepSpeed's kernels, which keep them in fp32."""
NAMES: dict[str, memory.Moment] = {"gather": "forward", "regather": "backward"}
"""Events that are none to the closed form -> those that they come before."""


class ZeroMemory(StrategyMemory):
    """What DeepSpeed holds at each moment of a step."""

    def __init__(
        self,
        stage: Zero,
        model: ModelShape,
        precision: Precision,
        optimizer: OptimizerShape,
        *,
        ranks: int,
    ) -> None:
        self.ranks = ranks
        self._stage = stage
        self._optimizer = optimizer
        self._weights = _weights(model, precision)
        moments = round(optimizer.bits / 8)
        if uses_deepspeed_kernel(stage, optimizer.algorithm):
            moments = KERNEL_MOMENTS
        self._setting = Setting(
            stage=stage,
            world=ranks,
            compute=precision.compute,
            master=precision.master,
            reduce=precision.reduce,
            moment_bytes=moments,
        )
        self._gradients = memory.gradients(self._setting, self._weights)

    def held(self, moment: Moment) -> Iterator[Item]:
        event = NAMES.get(moment.event, moment.event)
        within = event not in ("load", "step", "between")
        yield from memory.held(
            self._setting,
            self._weights,
            event,  # type: ignore[arg-type]
            place=moment.unit,
            accumulating=within and not moment.first,
        )

    def gradients(self, moment: Moment) -> Gradients:
        if self._weights.tied and not isinstance(moment.unit, int):
            return Gradients(0, 0)  # which the closed form counts
        return self._gradients

    @property
    def masters(self) -> tuple[int, Place]:
        at = self._setting.state_at
        return self._setting.share(self._trained), "host" if at == "disk" else at

    @property
    def updated(self) -> int:
        if self._stage.offload_optimizer is not None:
            return 0
        part = self._setting.share(self._trained)
        return self._optimizer.touched(part, self._setting.master_bytes)

    @property
    def _trained(self) -> int:
        return sum(self._weights.trained)

    def traffic(self, microbatches: int) -> Iterator[Traffic]:
        if self.ranks == 1:
            return
        s, sharded = self._setting, self._stage.stage == 3
        gathered = self._trained
        if sharded:
            gathered = memory.gathers(s, self._weights, microbatches)
        reductions = microbatches if self._stage.stage > 1 else 1
        yield Traffic(
            # Stages 1 and 2 give all ranks all of it (use_multi_rank_bucket_allreduce).
            collective="reduce-scatter" if sharded else "all-reduce",
            bytes=s.reduce_bytes * self._trained * reductions,
            ranks=self.ranks,
            what="gradients",
        )
        yield Traffic(
            collective="all-gather",
            bytes=s.compute_bytes * gathered,
            ranks=self.ranks,
            what="parameters",
        )

    def copies(self, microbatches: int) -> Copies:
        return copies(self._setting, self._weights, microbatches)


def _weights(model: ModelShape, precision: Precision) -> Weights:
    """The model as the closed form knows it; what is packed counts in numbers of the compute
    dtype."""
    size = memory.BYTES[precision.compute]

    def weight(declared: Declared) -> Weight:
        elements = -(-declared.bytes(size) // size)
        return Weight(elements=elements, trained=declared.trained)

    kinds = [tuple(map(weight, weights)) for weights in model.kinds]
    return Weights(
        blocks=tuple(kinds[kind] for kind in model.blocks),
        root=tuple(map(weight, model.root)),
        tied=model.tied,
    )


class ZeroPlanner(Planner[Zero]):
    """Of `wrap.zero`."""

    @classmethod
    def presets(cls) -> Presets:
        host = {"device": "cpu"}
        disk = {"device": "nvme", "path": "/nvme"}
        return {
            "zero1": Preset(what="shards of optimizer state", fields={"stage": 1}),
            "zero2": Preset(what="shards of optimizer state and gradients", fields={"stage": 2}),
            "zero3": Preset(what="shards of everything", fields={"stage": 3}),
            "zero3-offload": Preset(
                order=Tier.OFFLOADED,
                what="shards, optimizer state in host memory",
                fields={"stage": 3, "offload_optimizer": host},
            ),
            "zero3-offload-all": Preset(
                order=Tier.MORE_OFFLOADED,
                what="shards, optimizer state and parameters in host memory",
                fields={"stage": 3, "offload_optimizer": host, "offload_param": host},
            ),
            "zero3-nvme": Preset(
                order=Tier.OFFLOADED_TO_DISK,
                what="optimizer state on a local disk (say which in path), parameters on the host",
                fields={"stage": 3, "offload_optimizer": disk, "offload_param": host},
            ),
        }

    def forecast(
        self, topology: Topology, profile: Profile, precision: Precision, optimizer: OptimizerShape
    ) -> StrategyMemory:
        return ZeroMemory(self.stage, profile.model, precision, optimizer, ranks=topology.ranks)
