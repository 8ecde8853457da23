"""The planner of `wrap.zero`."""

from __future__ import annotations

from pipeline.artifacts import Precision
from pipeline.planning.planner import Planner, Tier, Topology
from pipeline.planning.profile import Profile
from pipeline.planning.shapes import OptimizerShape
from pipeline.stage import Preset, Presets
from stages.wrap.zero.memory import ZeroMemory
from stages.wrap.zero.sharded import Sharded
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


class ZeroPlanner(Planner[Zero]):
    """Tells presets of DeepSpeed ZeRO, and what each rank holds under it."""

    @classmethod
    def presets(cls) -> Presets:
        return {
            name: Preset(order=order, what=what, fields=fields)
            for name, (order, fields, what) in PRESETS.items()
        }

    def forecast(
        self, topology: Topology, profile: Profile, precision: Precision, optimizer: OptimizerShape
    ) -> ZeroMemory:
        share = Sharded if self.stage.stage == 3 else ZeroMemory
        return share(self.stage, profile.model, precision, optimizer, ranks=topology.ranks)
