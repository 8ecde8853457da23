"""Two real steps on this machine, by the recipe's own engine."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.devices import gpu_count
from pipeline.doctor.ranks import measure
from pipeline.errors import RunFailed, UsageError
from pipeline.forecast.result import Forecast
from pipeline.forecast.site import PROCESS
from pipeline.machine import free_memory
from pipeline.plan import Plan
from pipeline.throughput import human
from pipeline.tracing.training import training

SECONDS = 1800
"""After which a measurement is given up."""
SPARE = 1.2
"""How much more memory is asked for than the forecast says."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Peaks of the fullest rank, in bytes."""

    device: str
    """`cuda` or `cpu`."""
    ranks: int
    peaks: Mapping[str, int]
    """Phase -> what tensors took."""


def measure_here(plan: Plan, forecast: Forecast) -> Measured:
    """On this machine's GPUs if there is one for each rank, or else as CPU processes. Raises
    UsageError where the forecast has no room here or the recipe's training cannot be watched, and
    RunFailed."""
    training(plan)
    ranks = plan.view.procs
    device = "cuda" if plan.view.device == "cuda" and gpu_count() >= ranks else "cpu"
    if device == "cpu":
        needed, there = ranks * (round(forecast.peak * SPARE) + PROCESS), free_memory()
        if needed > there:
            raise UsageError(
                f"--measure: {ranks} processes on this machine's CPUs would take about "
                f"{human(needed)} of memory, {human(there)} are free",
                hint="measure fewer ranks or a smaller model; --trace needs no memory",
            )
    with tempfile.TemporaryDirectory(prefix="pipe-measure-") as name:
        recipe = Path(name) / "recipe.yaml"
        recipe.write_text(plan.recipe.dump(), "utf-8")
        settings = {"folder": name, "recipe": str(recipe), "device": device, "ranks": ranks}
        told = measure("pipeline.tracing.rank:steps", settings, procs=ranks, seconds=SECONDS)
    if told.failure:
        raise RunFailed(f"--measure: {told.failure}")
    peaks: dict[str, int] = {}
    for record in told.all_records:
        for phase, size in record.items():
            peaks[phase] = max(size, peaks.get(phase, 0))
    return Measured(device=device, ranks=ranks, peaks=peaks)
