"""Records of a run's GPUs in its folder: readings while it is under way (`hardware.jsonl`), and the
memory that a training took (`memory.json`).

The launching process writes a line of readings every 15 seconds; of a longer run fewer, so that the
file stays small. Plans read the memory, for what their tensors will take on GPUs of the same kind.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from pipeline.contracts.stage import Context
from pipeline.errors import UsageError, first_validation_error, in_words
from pipeline.execution import rundir
from pipeline.hardware.telemetry import Telemetry
from pipeline.utils.files import replace_text
from pipeline.utils.foreign import (
    append_line,
    is_number,
    is_text,
    read_lines,
    read_tail,
    read_whole,
)

READINGS, MEMORY = "hardware.jsonl", "memory.json"
SECONDS = 15.0
"""Seconds between two records, at first."""
MOST = 2000
"""Records of a file. One more, and every second is dropped, and the time between two doubled."""


class HardwareRecord:
    """Reads the GPUs now and then, and writes what it has read."""

    def __init__(self, folder: Path, telemetry: Telemetry | None = None) -> None:
        self._file, self._metrics = folder / READINGS, folder / rundir.METRICS
        self._telemetry = telemetry or Telemetry()
        self._count, self._seconds = 0, SECONDS
        with contextlib.suppress(OSError, TypeError, ValueError):
            earlier = list(read_lines(self._file))
            self._count = len(earlier)
            self._seconds = float(earlier[-1].get("seconds", SECONDS)) if earlier else SECONDS
        self._next = -math.inf

    def look(self) -> None:
        """Write a record, if it is time for one. Without GPUs, or where it cannot be written, do
        nothing from now on: the run has to continue."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = math.inf
        with contextlib.suppress(OSError):
            if gpus := self._telemetry.read():
                steps = (one for one in reversed(read_tail(self._metrics)) if "step" in one)
                newest = next(steps, {"step": 0})
                record = {"time": time.time(), "seconds": self._seconds}
                record |= {key: newest[key] for key in ("step", "slot") if key in newest}
                append_line(self._file, {**record, "gpus": [asdict(gpu) for gpu in gpus]})
                self._count += 1
                if self._count > MOST:
                    self._seconds *= 2
                    kept = [{**one, "seconds": self._seconds} for one in read_lines(self._file)]
                    replace_text(self._file, "".join(f"{json.dumps(one)}\n" for one in kept[::2]))
                    self._count = len(kept[::2])
                self._next = now + self._seconds


def hardware_records(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of the run in `folder`; none of a run without GPUs."""
    for record in read_lines(folder / READINGS):
        gpus = record.get("gpus")
        dicts = isinstance(gpus, list) and all(isinstance(gpu, dict) for gpu in gpus)
        readings: list[dict[str, Any]] = gpus if dicts and gpus is not None else [{}]
        reasons = [gpu.get("throttled") for gpu in readings]
        rest = [gpu[key] for gpu in readings for key in gpu.keys() - {"throttled"}]
        if (
            is_number(record.get("step")) and is_text(record.get("slot", ""))
            and all(type(gpu.get("index")) is int for gpu in readings)
            and all(isinstance(one, list) and all(map(is_text, one)) for one in reasons)
            and all(one is None or is_text(one) or is_number(one) for one in rest)
        ):  # fmt: skip
            yield record


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
    """Write `memory.json` after a training on GPUs (collective). A GPU that does not report its
    memory and a failure to write are warnings: the training has succeeded."""
    if ctx.dist.device.type == "cpu":
        return
    import torch

    device, own = ctx.dist.device, None
    try:
        free, total = torch.cuda.mem_get_info(device)
        own = {
            "device": torch.cuda.get_device_name(device),
            "device_bytes": total,
            "allocated_bytes": torch.cuda.max_memory_allocated(device),
            "reserved_bytes": torch.cuda.max_memory_reserved(device),
            "beside_bytes": max(total - free - torch.cuda.memory_reserved(device), 0),
            "torch": torch.__version__,
        }
    except RuntimeError as error:
        ctx.log.warning("the GPU does not report its memory: %s", error)
    found = [record for record in ctx.dist.gather(own) if record]
    if ctx.dist.is_main and found:
        fullest = max(found, key=lambda record: record["reserved_bytes"])
        try:
            replace_text(ctx.run_dir / MEMORY, json.dumps(fullest, indent=1) + "\n")
        except OSError as error:
            ctx.log.warning("%s cannot be written: %s", MEMORY, in_words(error))


def read_record(place: Path) -> MemoryRecord:
    """The record in a run's folder, or in a file. Raises UsageError where there is none."""
    file, run = (place / MEMORY, place) if place.is_dir() else (place, None)
    try:
        return MemoryRecord.model_validate_json(read_whole(file, within=run))
    except OSError as error:
        hint = f"a run writes {MEMORY} in its folder when it has trained on GPUs"
        raise UsageError(f"{file} cannot be read: {in_words(error)}", hint=hint) from error
    except ValidationError as error:
        problem = first_validation_error(error)
        raise UsageError(f"{file} is not a record of a run's memory: {problem}") from error


def newest_record(
    runs: Path, suits: Callable[[MemoryRecord], bool]
) -> tuple[str, MemoryRecord] | None:
    """Name of the run and its record, of those in a folder of runs that suit; None without any."""
    found = sorted(runs.glob(f"*/{MEMORY}"), key=lambda one: one.lstat().st_mtime)
    for file in reversed(found):
        with contextlib.suppress(UsageError):  # of another version, or another program's
            record = read_record(file.parent)
            if suits(record):
                return file.parent.name, record
    return None
