"""The live side of checkpoint.deepspeed."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import CheckpointError
from pipeline.stage import Context
from stages.checkpoint.steps import StepCheckpoints
from stages.wrap.zero import compat
from stages.wrap.zero.artifact import ZeroEngine
from stages.wrap.zero.restore import restore_bias_correction, restore_swapped_state

TAG = "state"
"""Sub-folder with DeepSpeed's files; `latest` beside it names it for DeepSpeed's own tools."""


class DeepSpeedCheckpoints(StepCheckpoints):
    """Files of `DeepSpeedEngine.save_checkpoint`; resuming from them is exact to the bit."""

    format = "deepspeed"

    def __init__(
        self, ctx: Context, engine: ZeroEngine, *, every: int | None, keep: int | None
    ) -> None:
        super().__init__(ctx, every=every, keep=keep)
        self._engine = engine

    def write(self, folder: Path) -> None:
        with compat.quiet(self._ctx.log):
            self._engine.deepspeed.save_checkpoint(str(folder), tag=TAG)

    def read(self, folder: Path) -> None:
        live = self._engine.deepspeed
        with compat.quiet(self._ctx.log):
            path, _ = live.load_checkpoint(str(folder), tag=TAG)
        if path is None:
            raise CheckpointError(f"{folder}: DeepSpeed finds no checkpoint of its own there")
        restore_swapped_state(live, folder / TAG)
        restore_bias_correction(live)
