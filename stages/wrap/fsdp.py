"""Fully sharded data parallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from pipeline.artifacts import ModelSource, OptimizerPlan, Precision
from pipeline.engine import Engine
from pipeline.errors import Problem
from pipeline.forecast.options import REDUCE, Order, Saving
from pipeline.forecast.placement import Placement
from pipeline.forecast.shapes import ModelShape, OptimizerShape
from pipeline.forecast.site import Site
from pipeline.forecast.sizes import Sizes
from pipeline.stage import Context, PlanView, Preset, Presets

Sharding = Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"]
WHOLE = {"reduce_every_microbatch": False}
"""Gradients stay whole until a step's last micro-batch, and are sent once."""


@dataclass(frozen=True, kw_only=True)
class Fsdp:
    """Shard parameters, gradients and optimizer state across ranks (torch fully_shard, FSDP2)."""

    sharding: Sharding = "full_shard"
    """What is sharded: full_shard gathers parameters again in backward; shard_grad_op keeps them
    gathered from forward to backward; hybrid_shard shards within groups of `shard_size` ranks and
    replicates across them; no_shard replicates everything."""

    shard_size: Annotated[int, Gt(0)] | None = None
    """With hybrid_shard: ranks that share one copy of the model; null means those of one node."""

    units: Literal["block", "size"] | tuple[str, ...] = "block"
    """What is gathered at a time: each transformer block, modules of at least `unit_size`
    parameters, or modules of the named classes."""

    unit_size: Annotated[int, Gt(0)] = 20_000_000
    """With units: size. Fewest parameters of a unit."""

    forward_prefetch: Annotated[int, Ge(0)] = 0
    """Units to gather ahead explicitly in forward; 0 leaves it to torch's own overlap."""

    backward_prefetch: Annotated[int, Gt(0)] = 1
    """Units to gather ahead in backward; 1 is torch's own schedule."""

    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory and step there."""

    pin_memory: bool = True
    """With cpu_offload on a GPU: use page-locked host memory, which copies faster."""

    reduce_every_microbatch: bool = True
    """While accumulating, reduce each micro-batch's gradients, so that they stay sharded; false
    reduces once a step and holds whole gradients on every rank meanwhile."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        if self.shard_size is not None and self.sharding != "hybrid_shard":
            yield Problem(key="shard_size", message="only means something with hybrid_shard")
        if self.shard_size is not None and plan.procs % self.shard_size:
            yield Problem(
                key="shard_size",
                message=f"{plan.procs} processes do not divide into groups of {self.shard_size}",
            )
        if self.sharding == "no_shard" and self.cpu_offload:
            yield Problem(key="cpu_offload", message="needs a sharding", hint="use full_shard")

    @classmethod
    def presets(cls) -> Presets:
        return {
            "fsdp-shard-grad-op": Preset(
                order=Order.PARTLY_SHARDED,
                what="shards, gathered once for forward and backward",
                fields={"sharding": "shard_grad_op"},
                at_first=WHOLE,
            ),
            "fsdp": Preset(
                order=Order.SHARDED,
                what="shards over all ranks, gathered block by block",
                fields={"sharding": "full_shard"},
                at_first=WHOLE,
            ),
            "fsdp-hybrid": Preset(
                order=Order.SHARDED_WITHIN_NODES,
                what="shards within each node, gradients averaged across nodes",
                fields={"sharding": "hybrid_shard"},
                at_first=WHOLE,
            ),
        }

    def savings(self, ranks: int) -> Iterator[Saving]:
        if not self.reduce_every_microbatch:
            yield Saving(
                order=REDUCE,
                what="gradients are reduced after every micro-batch",
                fields={"reduce_every_microbatch": True},
            )

    def forecast(
        self, site: Site, model: ModelShape, precision: Precision, optimizer: OptimizerShape
    ) -> Placement:
        from stages.wrap.fsdp_placement import FsdpPlacement

        shards = {"no_shard": 1, "hybrid_shard": self.shard_size or site.local_ranks}
        return FsdpPlacement(
            site.ledger,
            model,
            optimizer,
            Sizes.of(precision),
            ranks=site.ranks,
            shards=shards.get(self.sharding, site.ranks),
            replicated=self.sharding in shards,
            reshard=self.sharding in ("full_shard", "hybrid_shard"),
            reduce_always=self.reduce_every_microbatch,
            offload=self.cpu_offload,
            forward_ahead=self.forward_prefetch,
            backward_ahead=self.backward_prefetch,
        )

    def trace(
        self,
        ctx: Context,
        site: Site,
        model: ModelSource,
        precision: Precision,
        optimizer: OptimizerPlan,
    ) -> Engine | None:
        # A trace has no second place to offload to.
        if self.cpu_offload and site.device != "cpu":
            return None
        return self.run(ctx, model, precision, optimizer)

    def run(
        self, ctx: Context, model: ModelSource, precision: Precision, optimizer: OptimizerPlan
    ) -> Engine:
        from stages.wrap.fsdp_engine import build

        return build(self, ctx, model, precision, optimizer)
