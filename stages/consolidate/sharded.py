"""Full tensors out of canonical checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.artifacts import TrainedRun, Weights
from pipeline.stage import Context


@dataclass(frozen=True, kw_only=True)
class ConsolidateSharded:
    """Stream full master weights out of a canonical checkpoint, one at a time, every byte of them
    verified."""

    def run(self, ctx: Context, trained: TrainedRun) -> Weights:
        from stages.consolidate.sharded_reader import ShardedWeights

        return ShardedWeights(trained.checkpoint)
