"""What an export will need, told from the declared model alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipeline.artifacts import ModelSource, torch_dtype
from pipeline.stage import Context, Room
from stages.export.plan import AS_SOURCE
from stages.export.target import target_of
from stages.model import compat
from stages.model.outline import outline

if TYPE_CHECKING:
    from torch import nn

    from stages.export.safetensors import ExportSafetensors


BUFFERS = 64 << 20
"""Bytes for what is on its way, and activations of a short prompt."""


def room(stage: ExportSafetensors, ctx: Context, source: ModelSource) -> Room:
    """Disk for the weight files; memory for the proof with one block at a time."""
    model = outline(source.exported)
    widest = torch.float32 if stage.dtype == AS_SOURCE else torch_dtype(stage.dtype)
    folder = target_of(stage.folder, ctx)
    return Room(
        what=f"the export in {folder.name}",
        disk=_size(model, widest),
        folder=folder,
        memory=_resident(model, widest) + BUFFERS,
    )


def _size(module: nn.Module, dtype: torch.dtype) -> int:
    return sum(tensor.numel() for tensor in module.parameters()) * dtype.itemsize


def _resident(model: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of what lies outside the blocks, and of the largest block."""
    kinds = compat.block_classes(model)
    blocks = [_size(m, dtype) for m in model.modules() if type(m).__name__ in kinds]
    return _size(model, dtype) - sum(blocks) + max(blocks, default=0)
