"""A record of the GPU memory that a training took: `memory.json` in its run's folder.

A run writes it; plans read it, for what their tensors will take on GPUs of the same kind.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from pipeline.errors import UsageError, first_mistake, in_words
from pipeline.utils.files import replace_text
from pipeline.utils.foreign import read_whole

if TYPE_CHECKING:
    from pipeline.contracts.stage import Context

FILE = "memory.json"


class MemoryRecord(BaseModel):
    """The fullest rank's GPU when a training had come to its end. Bytes."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    device: str
    """Name of the GPU's kind."""
    device_bytes: PositiveInt
    allocated_bytes: PositiveInt
    """Peak of tensors, in bytes."""
    reserved_bytes: PositiveInt
    """Most that torch's allocator had taken for them."""
    beside_bytes: NonNegativeInt
    """Bytes in use outside the allocator: the CUDA context, NCCL, other processes."""


def record_memory(ctx: Context) -> None:
    """Write `memory.json` after a training on GPUs (collective). A failure to write is a warning:
    the training has succeeded."""
    if ctx.dist.device.type == "cpu":
        return
    found = [record for record in ctx.dist.gather(_of_this_gpu(ctx)) if record]
    if ctx.dist.is_main and found:
        fullest = max(found, key=lambda record: record["reserved_bytes"])
        try:
            replace_text(ctx.run_dir / FILE, json.dumps(fullest, indent=1) + "\n")
        except OSError as error:
            ctx.log.warning("%s cannot be written: %s", FILE, in_words(error))


def release_memory(ctx: Context) -> None:
    """Give back what a training's engine has left of a GPU's memory, and count peaks from here on:
    a further training has its own."""
    if ctx.dist.device.type != "cpu":
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(ctx.dist.device)


def read_record(place: Path) -> MemoryRecord:
    """The record in a run's folder, or in a file. Raises UsageError where there is none."""
    file, run = (place / FILE, place) if place.is_dir() else (place, None)
    try:
        return MemoryRecord.model_validate_json(read_whole(file, within=run))
    except OSError as error:
        hint = f"a run writes {FILE} in its folder when it has trained on GPUs"
        raise UsageError(f"{file} cannot be read: {in_words(error)}", hint=hint) from error
    except ValidationError as error:
        problem = first_mistake(error)
        raise UsageError(f"{file} is not a record of a run's memory: {problem}") from error


def newest_record(
    runs: Path, suits: Callable[[MemoryRecord], bool]
) -> tuple[str, MemoryRecord] | None:
    """Name of the run and its record, of those in a folder of runs that suit; None without any."""
    for file in sorted(runs.glob(f"*/{FILE}"), key=lambda one: one.lstat().st_mtime, reverse=True):
        with contextlib.suppress(UsageError):  # of another version, or another program's
            record = read_record(file.parent)
            if suits(record):
                return file.parent.name, record
    return None


def _of_this_gpu(ctx: Context) -> dict[str, Any] | None:
    """Record of this rank's GPU, as JSON; None, with a warning, where its driver does not report
    memory."""
    import torch

    device = ctx.dist.device
    try:
        free, total = torch.cuda.mem_get_info(device)
        return {
            "device": torch.cuda.get_device_name(device),
            "device_bytes": total,
            "allocated_bytes": torch.cuda.max_memory_allocated(device),
            "reserved_bytes": torch.cuda.max_memory_reserved(device),
            "beside_bytes": max(total - free - torch.cuda.memory_reserved(device), 0),
            "torch": torch.__version__,
        }
    except RuntimeError as error:
        ctx.log.warning("the GPU does not report its memory: %s", error)
        return None
