"""Peak memory of one training, found in two ways."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from memories import oracle
from memories.cases import Case
from pipeline.planning.estimate import ask_planners, step_peaks
from pipeline.planning.forecast import BACKWARD, FORWARD, UPDATE, Held, Profile, StrategyMemory
from pipeline.planning.planner import Job
from pipeline.planning.shapes import Step
from pipeline.planning.trace.profiling import profile


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The step's peak on a rank, in bytes, as forecast and by the reference."""

    case: Case
    told: int
    reference: int

    @property
    def error(self) -> float:
        """Return the relative error."""
        return self.told / self.reference - 1


def step_peak(peaks: Mapping[str, Held]) -> int:
    """Return the highest peak of a training step's phases."""
    return max(peaks[phase].bytes for phase in (FORWARD, BACKWARD, UPDATE))


def job(case: Case, folder: Path, device: str) -> Job:
    """Return the case as a recipe in the folder, with its planners."""
    return Job.of(case.plan(folder, device=device), case.topology(device))


def forecast(here: Job) -> tuple[Profile, StrategyMemory, Step]:
    """Return the model's profile, the strategy's share and the step, from a recipe's planners."""
    found = profile(here)
    told = ask_planners(here, found)
    strategy = told.require(StrategyMemory, "nothing wraps the model")
    return found, strategy, told.require(Step, "nothing is trained")


def profile_and_trace(case: Case) -> Pair:
    """Compare the forecast from the model's profile and the strategy's share with a trace: of the
    GPU's memory, or, where the strategy offloads, of GPU and host together. Raises StageError for a
    model that needs values."""
    device = "cpu" if case.strategy.get("cpu_offload") else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        here = job(case, Path(folder), device)
        found, strategy, step = forecast(here)
        traced = oracle.step_peaks(here) if here.topology.stages > 1 else oracle.run(here)
    peaks_at = step_peaks(found, strategy, samples=step.micro_batch, microbatches=step.microbatches)
    peaks = peaks_at["both" if device == "cpu" else "device"]
    return Pair(case=case, told=step_peak(peaks), reference=step_peak(traced))


def trace_and_tensors(case: Case) -> Pair:
    """Compare a trace with real tensors, both of the whole model on CPUs."""
    with tempfile.TemporaryDirectory() as folder:
        here = job(case, Path(folder), "cpu")
        told, reference = oracle.run(here), oracle.run(here, fake=False)
    return Pair(case=case, told=step_peak(told), reference=step_peak(reference))


def summary(pairs: Iterable[Pair]) -> tuple[float, float]:
    """Return median and maximum of the errors' sizes."""
    sizes: Sequence[float] = [abs(pair.error) for pair in pairs]
    return statistics.median(sizes), max(sizes)
