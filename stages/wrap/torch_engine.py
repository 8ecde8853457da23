"""The artifact that wraps built on plain torch give; checkpoint stages for torch state need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.engine import Engine

if TYPE_CHECKING:
    from torch.amp import GradScaler
    from torch.optim import Optimizer


class TorchEngine(Engine):
    """An engine whose whole state is a torch module and a torch optimizer.

    `torch.distributed.checkpoint.state_dict` can therefore read and write it, with names as in the
    source model.
    """

    optimizer: Optimizer
    scaler: GradScaler | None
