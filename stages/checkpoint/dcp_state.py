"""The live side of checkpoint.dcp.

torch writes `.metadata` as a pickle. Only folders of this run, written by this program, are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from pipeline.stage import Context
from stages.checkpoint.steps import StepCheckpoints, read_json, write_json
from stages.wrap.torch_engine import TorchEngine

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class DcpCheckpoints(StepCheckpoints):
    """Model and optimizer by their names in the source model; the loss scaler as JSON."""

    format = "dcp"

    def __init__(
        self, ctx: Context, engine: TorchEngine, *, every: int | None, keep: int | None
    ) -> None:
        super().__init__(ctx, every=every, keep=keep)
        self._engine = engine

    def write(self, folder: Path) -> None:
        save(self._state(), checkpoint_id=folder)
        if self._ctx.dist.is_main and self._engine.scaler is not None:
            write_json(folder / "scaler.json", self._engine.scaler.state_dict())

    def read(self, folder: Path) -> None:
        engine = self._engine
        state = self._state()
        load(state, checkpoint_id=folder)
        set_model_state_dict(engine.model, state["model"], options=OPTIONS)
        settings = group_settings(engine.optimizer)
        set_optimizer_state_dict(
            engine.model, engine.optimizer, state["optimizer"], options=OPTIONS
        )
        # Rates and decays are the recipe's to say, also when they were others at the save.
        for group, setting in zip(engine.optimizer.param_groups, settings, strict=True):
            group.update(setting)
        if engine.scaler is not None:
            engine.scaler.load_state_dict(read_json(folder / "scaler.json"))

    def _state(self) -> dict[str, Any]:
        engine = self._engine
        return {
            "model": get_model_state_dict(engine.model, options=OPTIONS),
            "optimizer": get_optimizer_state_dict(engine.model, engine.optimizer, options=OPTIONS),
        }


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What each parameter group is configured with."""
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
