"""What an export will need, told from the declared model alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.artifacts import ModelSource, torch_dtype
from pipeline.stage import Context, Room
from stages.export.plan import AS_SOURCE, declared
from stages.export.proof import ROOM
from stages.model import compat

if TYPE_CHECKING:
    from torch import nn

    from stages.export.safetensors import ExportSafetensors


def room(stage: ExportSafetensors, ctx: Context, source: ModelSource) -> Room:
    """Disk for the weight files; memory for the proof with one block at a time."""
    outline = declared(source)
    widest = torch.float32 if stage.dtype == AS_SOURCE else torch_dtype(stage.dtype)
    folder = Path(stage.folder).expanduser() if stage.folder else ctx.run_dir / "export"
    return Room(
        what=f"the export in {folder.name}",
        disk=_size(outline, widest),
        folder=folder.absolute(),
        memory=_resident(outline, widest) + ROOM,
    )


def _size(module: nn.Module, dtype: torch.dtype) -> int:
    return sum(tensor.numel() for tensor in module.parameters()) * dtype.itemsize


def _resident(outline: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of what lies outside the blocks, and of the largest block."""
    kinds = compat.block_classes(outline)
    blocks = [_size(m, dtype) for m in outline.modules() if type(m).__name__ in kinds]
    return _size(outline, dtype) - sum(blocks) + max(blocks, default=0)
