"""Planner of wrap.fsdp: presets, savings, memory and traffic as torch's fully_shard has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline import Precision, planning
from pipeline.planning import Tier, Topology
from stages.wrap.axes import required
from stages.wrap.fsdp import Fsdp
from stages.wrap.fsdp_memory import Sharded
from stages.wrap.fsdp_stages import PipelinedShards
from stages.wrap.model_parts import model_parts

WHOLE = {"reduce_every_microbatch": False}
"""Fields that keep gradients whole until a step's last micro-batch, where they are reduced."""
PRESETS = {
    "fsdp-shard-grad-op": (Tier.PARTLY_SHARDED, "shard_grad_op", "shards, gathered once a pass"),
    "fsdp": (Tier.SHARDED, "full_shard", "shards over all ranks, gathered block by block"),
    "fsdp-hybrid": (Tier.SHARDED_WITHIN_NODES, "hybrid_shard", "shards within each node"),
}
OFFERS: dict[str, tuple[str, str, Sequence[int], str]] = {
    "context": ("cp", "context_parallel", (2, 4, 8, 16, 32), "every sample"),
    "tensor": ("tp", "tensor_parallel", (2, 4, 8), "every layer"),
    "experts": ("ep", "expert_parallel", (2, 4, 8, 16, 32), "experts"),
    "pipeline": ("pp", "pipeline_parallel", (2, 4, 8), "blocks"),
}
"""Axis among the presets -> its short name, its field, sizes to offer, and what its ranks share."""
BOTH = [("context", 2), ("context", 4), ("pipeline", 2), ("pipeline", 4)]
"""Axes to offer together with a tensor-parallel axis of 8 ranks."""


class FsdpPlanner(planning.Planner[Fsdp]):
    """Planner of `wrap.fsdp`."""

    @classmethod
    def presets(cls) -> planning.Presets:
        found = {
            name: planning.Preset(
                order=order, what=what, fields={"sharding": sharding}, at_first=WHOLE
            )
            for name, (order, sharding, what) in PRESETS.items()
        }
        single = [{axis: size} for axis, offer in OFFERS.items() for size in offer[2]]
        for axes in [*single, *({"tensor": 8, axis: size} for axis, size in BOTH)]:
            offers = [(*OFFERS[axis], size) for axis, size in axes.items()]
            shared = ", ".join(f"{what} over {size} ranks" for *_, what, size in offers)
            name = "-".join(["fsdp", *(f"{short}{size}" for short, *_, size in offers)])
            found[name] = planning.Preset(
                order=Tier.DIVIDED,
                what=f"shards, {shared}",
                fields={field: {"size": size} for _, field, *_, size in offers},
                # Gradients stay whole in a pipeline anyhow.
                at_first={} if "pipeline" in axes else WHOLE,
                axes=axes,
            )
        return found

    def savings(self, ranks: int) -> Iterator[planning.Saving]:
        if not self.stage.reduce_every_microbatch and self.stage.pipeline_parallel is None:
            fields, what = {"reduce_every_microbatch": True}, "gradients reduced every micro-batch"
            yield planning.Saving(order=planning.REDUCE, what=what, fields=fields)

    def division(self, topology: Topology) -> planning.Division | None:
        axes = required(self.stage, topology.ranks)
        return model_parts(self.stage, topology, self.stage.shards(axes, topology.local_ranks))

    def forecast(
        self, topology: Topology, profile: planning.Profile, precision: Precision,
        optimizer: planning.OptimizerShape, samples: planning.SampleShape | None = None,
    ) -> planning.StrategyMemory:  # fmt: skip
        if topology.stages == 1 or samples is None:
            return Sharded(self.stage, topology, profile.model, optimizer, precision)
        return PipelinedShards(self.stage, topology, profile, optimizer, precision, samples)
