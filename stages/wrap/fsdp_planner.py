"""Planner of wrap.fsdp: presets, savings and forecast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline import Precision
from pipeline.planning import (
    REDUCE,
    Division,
    OptimizerShape,
    Planner,
    Preset,
    Presets,
    Profile,
    SampleShape,
    Saving,
    Sizes,
    StrategyMemory,
    Tier,
    Topology,
)
from stages.wrap.axes import caveats, required
from stages.wrap.fsdp import Fsdp
from stages.wrap.fsdp_memory import Sharded
from stages.wrap.model_parts import model_parts

WHOLE = {"reduce_every_microbatch": False}
"""Fields that keep gradients whole until a step's last micro-batch, where they are reduced."""
PRESETS = {
    "fsdp-shard-grad-op": (Tier.PARTLY_SHARDED, "shard_grad_op", "shards, gathered once a pass"),
    "fsdp": (Tier.SHARDED, "full_shard", "shards over all ranks, gathered block by block"),
    "fsdp-hybrid": (Tier.SHARDED_WITHIN_NODES, "hybrid_shard", "shards within each node"),
}


@dataclass(frozen=True)
class AxisOffer:
    """An axis among the presets: its short name, its field, sizes to offer, and what its ranks
    share."""

    short: str
    field: str
    sizes: Sequence[int]
    shared: str


OFFERS = {
    "context": AxisOffer("cp", "context_parallel", (2, 4, 8, 16, 32), "every sample"),
    "tensor": AxisOffer("tp", "tensor_parallel", (2, 4, 8), "every layer"),
    "experts": AxisOffer("ep", "expert_parallel", (2, 4, 8, 16, 32), "experts"),
    "pipeline": AxisOffer("pp", "pipeline_parallel", (2, 4, 8), "blocks"),
}
BOTH: Sequence[tuple[int, str, int]] = (
    (8, "context", 2), (8, "context", 4), (8, "pipeline", 2), (8, "pipeline", 4),
)  # fmt: skip
"""Sizes to offer of the tensor-parallel axis with another one."""


class FsdpPlanner(Planner[Fsdp]):
    """Planner of `wrap.fsdp`."""

    @classmethod
    def presets(cls) -> Presets:
        found = {
            name: Preset(order=order, what=what, fields={"sharding": sharding}, at_first=WHOLE)
            for name, (order, sharding, what) in PRESETS.items()
        }
        single = [{axis: size} for axis, offer in OFFERS.items() for size in offer.sizes]
        for axes in [*single, *({"tensor": t, axis: n} for t, axis, n in BOTH)]:
            offers = [(OFFERS[axis], size) for axis, size in axes.items()]
            name = "-".join(["fsdp", *(f"{offer.short}{size}" for offer, size in offers)])
            shared = ", ".join(f"{offer.shared} over {size} ranks" for offer, size in offers)
            found[name] = Preset(
                order=Tier.DIVIDED,
                what=f"shards, {shared}",
                fields={offer.field: {"size": size} for offer, size in offers},
                # Gradients stay whole in a pipeline anyhow.
                at_first={} if "pipeline" in axes else WHOLE,
                axes=axes,
            )
        return found

    def savings(self, ranks: int) -> Iterator[Saving]:
        if not self.stage.reduce_every_microbatch and self.stage.pipeline_parallel is None:
            fields, what = {"reduce_every_microbatch": True}, "gradients reduced every micro-batch"
            yield Saving(order=REDUCE, what=what, fields=fields)

    def division(self, topology: Topology) -> Division | None:
        axes = required(self.stage, topology.ranks)
        return model_parts(self.stage, topology, self.stage.shards(axes, topology.local_ranks))

    def forecast(
        self, topology: Topology, profile: Profile, precision: Precision,
        optimizer: OptimizerShape, samples: SampleShape | None = None,
    ) -> StrategyMemory:  # fmt: skip
        sizes = Sizes.by(precision)
        if topology.stages > 1 and samples is not None:
            from stages.wrap.fsdp_stages import PipelinedShards

            share: StrategyMemory = PipelinedShards(
                topology, profile, optimizer, sizes, samples, config=self.stage
            )
        else:
            share = Sharded(topology, profile.model, optimizer, sizes, config=self.stage)
        share.caveats = caveats(self.stage)
        return share
