"""Full tensors out of checkpoints of any format."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.artifacts import TrainedRun, Weights
from pipeline.stage import Context


@dataclass(frozen=True, kw_only=True)
class ConsolidateStream:
    """Stream full tensors out of a checkpoint, whatever strategy, number of processes and format
    it was saved with: canonical, full, DeepSpeed's, torch.distributed.checkpoint's.

    Any range of any tensor is put together from the parts that ranks saved, while it is read;
    memory stays at a few MiB whatever the model's size. Masters are read where there are any. In
    canonical checkpoints every byte is verified.
    """

    def run(self, ctx: Context, trained: TrainedRun) -> Weights:
        from stages.consolidate.weights import open_weights

        return open_weights(trained.checkpoint, verify=ctx.dist.is_main)

    def rehearse(self, ctx: Context, trained: TrainedRun) -> Weights:
        return self.run(ctx, trained)
