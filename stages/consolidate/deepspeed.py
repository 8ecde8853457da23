"""Full tensors out of DeepSpeed's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.artifacts import TrainedRun, Weights
from pipeline.stage import Context


@dataclass(frozen=True, kw_only=True)
class ConsolidateDeepSpeed:
    """Stream full fp32 tensors out of a DeepSpeed checkpoint of any ZeRO stage, one at a time."""

    def run(self, ctx: Context, trained: TrainedRun) -> Weights:
        from stages.consolidate.deepspeed_reader import DeepSpeedWeights
        from stages.wrap.zero.compat import point_at_device

        point_at_device(ctx.dist)
        return DeepSpeedWeights(Path(trained.checkpoint))
