"""Files that DeepSpeed 0.19 wrote into a checkpoint folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import CheckpointError


def load_saved(file: Path) -> Mapping[str, Any]:
    """One of DeepSpeed's files, tensors mapped from disk. Unpickles nothing but tensors, plain
    containers and the few DeepSpeed classes that it puts there. Raises CheckpointError."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    classes = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    try:
        with torch.serialization.safe_globals(classes):
            state: Mapping[str, Any] = torch.load(
                file, map_location="cpu", mmap=True, weights_only=True
            )
    except Exception as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    return state
