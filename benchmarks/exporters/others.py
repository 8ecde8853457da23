"""What torch, accelerate and DeepSpeed have to make a model file of their checkpoints, and `cp`."""

from __future__ import annotations

import subprocess
from pathlib import Path

from apart.child import Job, Place, Work

from exporters.finish import flushed


def copy(job: Job, place: Place) -> Work:
    """`cp` of a file with the same bytes."""
    out = Path(job["out"])

    def call() -> None:
        subprocess.run(["cp", f"{job['input']}/model.safetensors", out], check=True)

    return flushed(call, out, place)


def zero_to_fp32(job: Job, place: Place) -> Work:
    """DeepSpeed's, with safetensors output; what `zero_to_fp32.py --safe_serialization` calls."""
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    def call() -> None:
        convert_zero_checkpoint_to_fp32_state_dict(
            job["input"], job["out"], safe_serialization=True
        )

    return flushed(call, Path(job["out"]), place)


def merge_weights(job: Job, place: Place) -> Work:
    """accelerate's; what `accelerate merge-weights` calls."""
    from accelerate.utils import merge_fsdp_weights

    def call() -> None:
        merge_fsdp_weights(job["input"], job["out"])

    return flushed(call, Path(job["out"]), place)


def consolidate(job: Job, place: Place) -> Work:
    """torch's `consolidate_safetensors_files`, one output file for each thread."""
    from shapes import split
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        consolidate_safetensors_files,
    )

    from exporters.trained import trained

    groups = split(trained(job["config"]).shapes, job["threads"])
    files = {name: number for number, names in enumerate(groups, start=1) for name in names}

    def call() -> None:
        consolidate_safetensors_files(job["input"], job["out"], files, job["threads"])

    return flushed(call, Path(job["out"]), place)


def torch_save(job: Job, place: Place) -> Work:
    """torch's `dcp_to_torch_save`."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    def call() -> None:
        dcp_to_torch_save(job["input"], f"{job['out']}/model.pt")

    return flushed(call, Path(job["out"]), place)
