"""Cost of a training's saves, by its metrics."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from pipeline.contracts import metrics
from pipeline.execution import rundir


def saves(run: Path) -> dict[str, Any]:
    """Return the seconds of each save's stall, of each until it was on disk, of the step behind
    each save, and the median of all other steps behind the first three."""
    stalls, behind, others, written = [], [], [], []
    after = False
    for record in metrics.records(run / rundir.METRICS):
        if "checkpoint_stall_seconds" in record:
            stalls.append(record["checkpoint_stall_seconds"])
            after = True
        elif "checkpoint_seconds" in record:
            written.append(record["checkpoint_seconds"])
        elif "step_seconds" in record and record["step"] > 3:
            (behind if after else others).append(record["step_seconds"])
            after = False
    return {
        "stall_seconds": stalls,
        "written_seconds": written,
        "step_behind_seconds": behind,
        "step_seconds": statistics.median(others) if others else None,
    }
