"""Peaks of one training, told in two ways."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from memories.cases import Case

from pipeline.planning.estimate import ask_planners, step_peaks
from pipeline.planning.forecast import BACKWARD, FORWARD, UPDATE, Held, Step, StrategyMemory
from pipeline.planning.planner import Job
from pipeline.planning.trace.profiling import profile
from pipeline.planning.trace.run import run


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The step's peak of a rank, in bytes."""

    case: Case
    told: int
    reference: int

    @property
    def error(self) -> float:
        """Relative to the reference."""
        return self.told / self.reference - 1


def step_peak(peaks: Mapping[str, Held]) -> int:
    """The highest of a training step's phases."""
    return max(peaks[phase].bytes for phase in (FORWARD, BACKWARD, UPDATE))


def job(case: Case, folder: Path, device: str) -> Job:
    """The case as a recipe in that folder, with its planners."""
    return Job.of(case.plan(folder, device=device), case.topology(device))


def profile_and_trace(case: Case) -> Pair:
    """What the model's profile and the strategy's share say, beside a trace: of the GPU, or, where
    the strategy offloads, of GPU and host together. Raises UsageError for a strategy that cannot be
    traced, and StageError for a model that needs values."""
    device = "cpu" if case.strategy.get("cpu_offload") else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        here = job(case, Path(folder), device)
        found = profile(here)
        told = ask_planners(here, found)
        strategy = told.require(StrategyMemory, "nothing wraps the model")
        step = told.require(Step, "nothing is trained")
        traced = run(here)
    peaks_at = step_peaks(found, strategy, samples=step.micro_batch, microbatches=step.microbatches)
    peaks = peaks_at["both" if device == "cpu" else "device"]
    return Pair(case=case, told=step_peak(peaks), reference=step_peak(traced.peaks))


def trace_and_tensors(case: Case) -> Pair:
    """A trace beside real tensors, both of the whole model on CPUs."""
    with tempfile.TemporaryDirectory() as folder:
        here = job(case, Path(folder), "cpu")
        told, reference = run(here), run(here, fake=False)
    return Pair(case=case, told=step_peak(told.peaks), reference=step_peak(reference.peaks))


def summary(pairs: Iterable[Pair]) -> tuple[float, float]:
    """Median and maximum of the errors' sizes."""
    sizes: Sequence[float] = [abs(pair.error) for pair in pairs]
    return statistics.median(sizes), max(sizes)
