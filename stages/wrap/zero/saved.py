"""What DeepSpeed 0.19 wrote into a checkpoint folder, and how to map it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import CheckpointError

_RANK = re.compile(r"(?:zero_pp|mp)_rank_(\d+)")


@dataclass(frozen=True, kw_only=True)
class SavedMasters:
    """One rank's flat fp32 master weights, a tensor per group (stages 1, 2) or sub-group (3)."""

    flats: Sequence[Tensor]
    alignment: Sequence[Sequence[int]] | None
    """Per group, the elements of padding behind each parameter; None where there are none."""

    def padding(self, group: int, parameters: int) -> Sequence[int]:
        """Elements of padding behind each of the group's parameters."""
        return self.alignment[group] if self.alignment else [0] * parameters


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


def rank_of(file: Path) -> int:
    """The data-parallel rank that a file's name tells."""
    match = _RANK.search(file.name)
    return int(match.group(1)) if match else 0


def saved_masters(state: Mapping[str, Any]) -> SavedMasters:
    """The masters in an `optim_states` file of any stage."""
    saved = state["optimizer_state_dict"]
    flats = saved.get("fp32_flat_groups")
    if flats is None:
        flats = saved["single_partition_of_fp32_groups"]
    return SavedMasters(flats=flats, alignment=saved.get("param_alignment_paddings"))


def swapped_in(folder: Path, rank: int, masters: SavedMasters) -> list[Tensor]:
    """Stage 3: `rank`'s flat masters, those swapped to disk when saved mapped from their copies."""
    return [flat if flat.numel() else _swapped(folder, rank, flat) for flat in masters.flats]


def _swapped(folder: Path, rank: int, flat: Tensor) -> Tensor:
    name = f"{flat.ds_id}.tensor.swp"  # type: ignore[attr-defined]
    if Path(name).name != name:
        raise CheckpointError(f"{folder}: names a file outside of it: {name!r}")
    file = folder / "offloaded_tensors" / f"rank{rank:02d}" / name
    if not file.is_file():
        raise CheckpointError(f"{file}: missing; it holds offloaded master weights")
    return torch.from_file(
        str(file), shared=False, size=file.stat().st_size // 4, dtype=torch.float32
    )
