"""A DeepSpeed ZeRO-3 checkpoint, as `save_checkpoint` of two ranks lays it out.

Adam's moments are holes in the files: they have their place, and read as zeros; `zero_to_fp32`
does not read them. Tied weights are not told, on which it fails with safetensors
(`shared_params`).
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import values
from apart.child import Job, Place, Work
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from exporters.trained import MOMENTS, STEP, WEIGHT, Trained, trained, zero3

ITEM = 4
TAG = f"global_step{STEP}"


def write(job: Job, place: Place) -> Work:
    """Write `folder`."""

    def work() -> Any:
        model, ranks, folder = trained(job["config"]), job["ranks"], Path(job["folder"])
        (folder / TAG).mkdir(parents=True)
        (folder / "latest").write_text(TAG, "utf-8")
        needed: list[tuple[str, int, int]] = []
        for rank in range(ranks):
            stem = f"{folder / TAG}/zero_pp_rank_{rank}_mp_rank_00"
            torch.save(_model_state(model, ranks), f"{stem}_model_states.pt")
            needed += _optimizer(Path(f"{stem}_optim_states.pt"), model, rank, ranks)
        return {"needed": needed}

    return work


def _optimizer(file: Path, model: Trained, rank: int, ranks: int) -> Iterator[tuple[str, int, int]]:
    """Write the file with holes, then the masters into theirs; yields where those are."""
    lengths = [
        sum(-(-math.prod(model.shapes[name]) // ranks) for name in names) for names in model.groups
    ]
    with FakeTensorMode(), skip_data(materialize_fake_tensors=True):
        torch.save(_optimizer_state(model, lengths, ranks), file)
    with FakeTensorMode():
        saved = torch.load(file, weights_only=False)["optimizer_state_dict"]["fp32_flat_groups"]
    parts = {held.name: held for held in zero3(model, rank, ranks)}
    with file.open("r+b") as out:
        for names, flat in zip(model.groups, saved, strict=True):
            begin = place = flat.untyped_storage()._checkpoint_offset
            for name in names:
                out.seek(place)
                if name in parts:
                    for data in values.floats(f"{WEIGHT}/{name}", *parts[name][1:]):
                        out.write(data.data.cast("B"))
                place += -(-math.prod(model.shapes[name]) // ranks) * ITEM
            yield str(file), begin, place


def _optimizer_state(model: Trained, lengths: list[int], ranks: int) -> dict[str, Any]:
    groups = [{**settings, "params": [number]} for number, settings in enumerate(model.settings())]
    states = {
        number: {"step": float(STEP), **{moment: torch.empty(length) for moment in MOMENTS}}
        for number, length in enumerate(lengths)
    }
    return {
        "optimizer_state_dict": {
            "zero_stage": 3,
            "partition_count": ranks,
            "loss_scaler": None,
            "optimizer_state_dict": {"state": states, "param_groups": groups},
            "fp32_flat_groups": [torch.empty(length) for length in lengths],
        },
        "ds_config": {},
        "ds_version": importlib.metadata.version("deepspeed"),
    }


def _model_state(model: Trained, ranks: int) -> dict[str, Any]:
    return {
        "module": {name: torch.empty(0, dtype=torch.bfloat16) for name in model.shapes},
        "buffer_names": [],
        "param_shapes": [
            {name: torch.Size(model.shapes[name]) for name in names} for names in model.groups
        ],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "global_steps": STEP,
        "skipped_steps": 0,
        "dp_world_size": ranks,
        "ds_config": {},
        "ds_version": importlib.metadata.version("deepspeed"),
    }
