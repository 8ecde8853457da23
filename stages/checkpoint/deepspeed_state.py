"""The live side of checkpoint.deepspeed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError
from pipeline.stage import Context
from pipeline.state.own import own_state
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
        self,
        ctx: Context,
        engine: ZeroEngine,
        *,
        borrowed: Set[str],
        every: int | None,
        keep: int | None,
    ) -> None:
        super().__init__(ctx, every=every, keep=keep)
        self._engine = engine
        self._borrowed = borrowed
        # DeepSpeed leaves out all that is frozen, or nothing.
        self._trained_only = bool(borrowed) and borrowed >= set(engine.state().frozen)

    @property
    def size(self) -> int:
        """Of fp32 masters and moments, and the compute weights."""
        state = own_state(self._engine, self._borrowed)
        elements = sum(math.prod(shape) for shape in state.shapes.values())
        return elements * 4 * (2 + len(state.moments))

    def write(self, folder: Path) -> None:
        with compat.quiet(self._ctx.log):
            self._engine.deepspeed.save_checkpoint(
                str(folder), tag=TAG, exclude_frozen_parameters=self._trained_only
            )

    def read(self, folder: Path) -> None:
        live = self._engine.deepspeed
        settings = [_settings(group) for group in compat.update_groups(live)]
        with compat.quiet(self._ctx.log):
            path, _ = live.load_checkpoint(
                str(folder), tag=TAG, load_module_strict=not self._trained_only
            )
        if path is None:
            raise CheckpointError(f"{folder}: DeepSpeed finds no checkpoint of its own there")
        restore_swapped_state(live, folder / TAG)
        restore_bias_correction(live)
        # Rates and decays are the recipe's to say, also when they were others at the save.
        for group, setting in zip(compat.update_groups(live), settings, strict=True):
            group.update(setting)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    # DeepSpeed's fused Adam counts its steps in the group.
    return {key: value for key, value in group.items() if key not in ("params", "step")}
