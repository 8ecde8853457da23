"""Peaks of one training, told in two ways."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from memories.cases import Case

from pipeline.forecast.ledger import Peak
from pipeline.forecast.phases import BACKWARD, FORWARD, UPDATE
from pipeline.forecast.shapes import SampleShape
from pipeline.tracing.extrapolate import highest
from pipeline.tracing.level import traced_forecast
from pipeline.tracing.run import run

STEP = (FORWARD, BACKWARD, UPDATE)


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


def step_peak(peaks: Mapping[str, Peak]) -> int:
    """The highest of a training step's phases."""
    return max(peaks[phase].bytes for phase in STEP)


def arithmetic_and_trace(case: Case) -> Pair:
    """The closed form beside a trace. Raises StageError for a model that has no closed form."""
    with tempfile.TemporaryDirectory() as folder:
        traced = traced_forecast(case.plan(Path(folder)), case.site())
    assert traced.arithmetic is not None
    return Pair(
        case=case,
        told=step_peak(traced.arithmetic.device),
        reference=step_peak(traced.forecast.device),
    )


def trace_and_tensors(case: Case) -> Pair:
    """A trace beside a run of the real engine on real tensors, on a CPU."""
    with tempfile.TemporaryDirectory() as folder:
        plan, samples = case.plan(Path(folder), device="cpu"), _samples(case)
        told, reference = (
            run(plan, case.site("cpu"), samples, fake=fake).trace.moments for fake in (True, False)
        )
    return Pair(
        case=case,
        told=step_peak(highest((phase, peak) for (phase, _, _), peak in told.items())),
        reference=step_peak(highest((phase, peak) for (phase, _, _), peak in reference.items())),
    )


def _samples(case: Case) -> SampleShape:
    return SampleShape(length=case.length, packed=case.packed)


def summary(pairs: Iterable[Pair]) -> tuple[float, float]:
    """Median and maximum of the errors' sizes."""
    sizes: Sequence[float] = [abs(pair.error) for pair in pairs]
    return statistics.median(sizes), max(sizes)
