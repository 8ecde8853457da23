"""What planning asks of `wrap.ddp`."""

from __future__ import annotations

from pipeline.artifacts import ModelSource, OptimizerPlan, Precision
from pipeline.engine import Engine
from pipeline.planning.planner import Planner, Tier
from pipeline.planning.profile import Profile
from pipeline.planning.shapes import OptimizerShape, Sizes
from pipeline.planning.strategy import StrategyMemory
from pipeline.planning.topology import Topology
from pipeline.stage import Context, Preset, Presets
from stages.wrap.ddp import Ddp
from stages.wrap.replicated import Replicated


class DdpPlanner(Planner[Ddp]):
    """Of `wrap.ddp`."""

    @classmethod
    def presets(cls) -> Presets:
        what = "every rank holds everything"
        return {"ddp": Preset(order=Tier.REPLICATED, what=what)}

    def forecast(
        self, topology: Topology, profile: Profile, precision: Precision, optimizer: OptimizerShape
    ) -> StrategyMemory:
        return Replicated(
            profile,
            optimizer,
            Sizes.by(precision),
            ranks=topology.ranks,
            views=self.stage.gradient_as_bucket_view,
            bucket=self.stage.bucket_cap_mb << 20,
        )

    def trace(
        self, ctx: Context, model: ModelSource, precision: Precision, optimizer: OptimizerPlan
    ) -> Engine:
        from stages.wrap.ddp_trace import build

        return build(self.stage, ctx, model, precision, optimizer)
