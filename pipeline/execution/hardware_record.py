"""A record of this machine's GPUs while a run is under way: `hardware.jsonl` in its folder.

The launching process writes it, a line every 15 seconds. A longer run has fewer, so that the file
stays small.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.execution import rundir
from pipeline.hardware.telemetry import Telemetry
from pipeline.utils.files import replace_text
from pipeline.utils.foreign import is_number, is_text
from pipeline.utils.jsonl import append_line, read_lines, read_tail

FILE = "hardware.jsonl"
SECONDS = 15.0
"""Seconds between two records, at first."""
MOST = 2000
"""Records of a file. One more, and every second is dropped, and the time between two doubled."""


class HardwareRecord:
    """Reads the GPUs now and then, and writes what it has read."""

    def __init__(self, folder: Path, telemetry: Telemetry | None = None) -> None:
        self._file, self._metrics = folder / FILE, folder / rundir.METRICS
        self._telemetry = telemetry or Telemetry()
        self._count, self._seconds = 0, SECONDS
        with contextlib.suppress(OSError, TypeError, ValueError):
            earlier = list(read_lines(self._file))
            self._count = len(earlier)
            self._seconds = float(earlier[-1].get("seconds", SECONDS)) if earlier else SECONDS
        self._next = -math.inf

    def look(self) -> None:
        """Write a record, if it is time for one. Without GPUs, or where it cannot be written, do
        nothing from now on: the run has to go on."""
        now = time.monotonic()
        if now < self._next:
            return
        gpus = self._telemetry.read()
        self._next = math.inf
        with contextlib.suppress(OSError):
            if gpus:
                steps = (one for one in reversed(read_tail(self._metrics)) if "step" in one)
                newest = next(steps, {"step": 0})
                record = {
                    "time": time.time(),
                    "seconds": self._seconds,
                    **{key: newest[key] for key in ("step", "slot") if key in newest},
                    "gpus": [asdict(gpu) for gpu in gpus],
                }
                append_line(self._file, record)
                self._count += 1
                if self._count > MOST:
                    self._thin()
                self._next = now + self._seconds

    def _thin(self) -> None:
        self._seconds *= 2
        kept = [{**one, "seconds": self._seconds} for one in read_lines(self._file)][::2]
        replace_text(self._file, "".join(f"{json.dumps(one)}\n" for one in kept))
        self._count = len(kept)


def hardware_records(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of the run in `folder`; none of a run without GPUs."""
    for record in read_lines(folder / FILE):
        gpus, step = record.get("gpus"), record.get("step")
        known = is_number(step) and is_text(record.get("slot", ""))
        if known and isinstance(gpus, list) and all(map(_is_reading, gpus)):
            yield record


def _is_reading(gpu: Any) -> bool:
    if not isinstance(gpu, dict) or type(gpu.get("index")) is not int:
        return False
    others = (value for key, value in gpu.items() if key not in ("index", "throttled"))
    reasons = gpu.get("throttled")
    return (
        isinstance(reasons, list)
        and all(map(is_text, reasons))
        and all(value is None or is_text(value) or is_number(value) for value in others)
    )
