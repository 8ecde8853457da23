"""Distributed data parallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from pipeline.artifacts import ModelSource, OptimizerPlan, Precision
from pipeline.engine import Engine
from pipeline.forecast.options import Order
from pipeline.forecast.placement import Placement
from pipeline.forecast.shapes import ModelShape, OptimizerShape
from pipeline.forecast.site import Site
from pipeline.forecast.sizes import Sizes
from pipeline.stage import Context, Preset, Presets


@dataclass(frozen=True, kw_only=True)
class Ddp:
    """Replicate the model on every rank and average gradients (torch DistributedDataParallel)."""

    bucket_cap_mb: Annotated[int, Gt(0)] = 25
    """Gradients are reduced in buckets of this many MiB, overlapping with backward."""

    gradient_as_bucket_view: bool = True
    """Let gradients be views of the buckets instead of copies; saves one copy of all gradients."""

    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order."""

    find_unused_parameters: bool = False
    """Search the graph every step for parameters without gradient; slow, for models that need
    it."""

    @classmethod
    def presets(cls) -> Presets:
        what = "every rank holds everything"
        return {"ddp": Preset(order=Order.REPLICATED, what=what)}

    def forecast(
        self, site: Site, model: ModelShape, precision: Precision, optimizer: OptimizerShape
    ) -> Placement:
        from stages.wrap.ddp_placement import DdpPlacement

        return DdpPlacement(
            site.ledger,
            model,
            optimizer,
            Sizes.of(precision),
            ranks=site.ranks,
            views=self.gradient_as_bucket_view,
            bucket=self.bucket_cap_mb << 20,
        )

    def trace(
        self, ctx: Context, model: ModelSource, precision: Precision, optimizer: OptimizerPlan
    ) -> Engine:
        from stages.wrap.ddp_trace import build

        return build(self, ctx, model, precision, optimizer)

    def run(
        self, ctx: Context, model: ModelSource, precision: Precision, optimizer: OptimizerPlan
    ) -> Engine:
        from stages.wrap.ddp_engine import build

        return build(self, ctx, model, precision, optimizer)
