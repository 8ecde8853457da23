"""The planner of `wrap.zero`."""

from __future__ import annotations

from pipeline.artifacts import Precision
from pipeline.planning.planner import Planner, Tier
from pipeline.planning.profile import Profile
from pipeline.planning.shapes import OptimizerShape
from pipeline.planning.strategy import StrategyMemory
from pipeline.planning.topology import Topology
from pipeline.stage import Preset, Presets
from stages.wrap.zero.memory import ZeroMemory
from stages.wrap.zero.memory.replicated import Accumulated, Replicated
from stages.wrap.zero.memory.sharded import Sharded
from stages.wrap.zero.stage import Zero


class ZeroPlanner(Planner[Zero]):
    """Tells presets of DeepSpeed ZeRO, and what each rank holds under it."""

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
        share = kind(self.stage, precision)
        return share(self.stage, profile.model, precision, optimizer, ranks=topology.ranks)


def kind(stage: Zero, precision: Precision) -> type[ZeroMemory]:
    """The class of DeepSpeed's optimizer that a stage ends up with (engine.py)."""
    if stage.stage == 3:
        return Sharded
    if stage.stage == 1 and precision.compute == "bf16" and stage.offload_optimizer is None:
        return Accumulated
    return Replicated
