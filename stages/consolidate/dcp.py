"""Full tensors out of native torch checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.artifacts import TrainedRun, Weights
from pipeline.stage import Context


@dataclass(frozen=True, kw_only=True)
class ConsolidateDcp:
    """Stream full tensors out of a torch.distributed.checkpoint folder, one at a time."""

    def run(self, ctx: Context, trained: TrainedRun) -> Weights:
        from stages.consolidate.dcp_reader import DcpWeights

        return DcpWeights(trained.checkpoint)
