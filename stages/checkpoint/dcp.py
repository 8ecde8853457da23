"""Native checkpoints of torch state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from pipeline.artifacts import Checkpoints
from pipeline.stage import Context
from stages.wrap.torch_engine import TorchEngine


@dataclass(frozen=True, kw_only=True)
class DcpCheckpoint:
    """Save and resume with torch.distributed.checkpoint, each rank its own part."""

    every: Annotated[int, Gt(0)] | None = None
    """Steps between checkpoints; null saves at the end only."""

    keep: Annotated[int, Gt(0)] | None = 2
    """Newest checkpoints to keep; null keeps all."""

    def run(self, ctx: Context, engine: TorchEngine) -> Checkpoints:
        from stages.checkpoint.dcp_state import DcpCheckpoints

        return DcpCheckpoints(ctx, engine, every=self.every, keep=self.keep)
