"""One optimizer step, and when its numbers are asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline import DistContext, Heartbeat, Progress, StepReport
from pipeline.contracts.objective import LossParts, ScoreRequest
from pipeline.errors import StageError
from stages.objectives.cross_entropy import CrossEntropy
from stages.train.anomalies import AnomalyMonitor
from stages.train.meter import StepMeter
from stages.train.settings import Anomalies
from stages.train.step import TrainStep


class Recording:
    """An engine that notes what it is asked for; the sum of the losses is 6."""

    data_axis = SimpleNamespace(count=1)
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[str] = []

    def accumulate(self, batches: Any, objective: Any, *, counts: Any) -> LossParts:
        self.calls.append("accumulate")
        six = torch.tensor(6.0)
        return LossParts(
            terms=dict.fromkeys(objective.units, six), sums=dict.fromkeys(objective.metrics, six)
        )

    def total(self, values: torch.Tensor) -> torch.Tensor:
        self.calls.append("total")
        return values

    def step(self, **options: Any) -> StepReport:
        self.calls.append("step")
        return StepReport(grad_norm=1.0, applied=True)


class Pairs:
    """An objective per group of rows, with metrics by rows."""

    request = ScoreRequest(tokens=True)
    units = ("groups",)

    def __init__(self, *metrics: str) -> None:
        self.metrics: Any = dict.fromkeys(metrics, "rows")


def step_of(
    engine: Any, objective: Any, progress: Progress, **counts: int
) -> tuple[TrainStep, StepMeter]:
    feed: Any = SimpleNamespace(
        counts=lambda position, units=(): counts, count=lambda position: 2,
        microbatches=lambda position: [], total_steps=lambda progress: 9,
    )  # fmt: skip
    plan: Any = SimpleNamespace(
        lr_scales=lambda step, total: [0.5], rates=lambda scales: {"lr": 0.1 * scales[0]},
    )  # fmt: skip
    meter = StepMeter(engine, DistContext(device=engine.device), progress)
    step = TrainStep(
        engine=engine,
        objective=objective,
        feed=feed,
        plan=plan,
        monitor=AnomalyMonitor(Anomalies(), engine.total),
        observe=meter.observe,
        heartbeat=Heartbeat(),
    )
    return step, meter


def test_the_sums_are_asked_for_before_the_update_and_read_behind_it() -> None:
    """So what the host waits for are the gradients, and not the update."""
    engine, progress = Recording(), Progress()
    step, meter = step_of(engine, CrossEntropy(), progress, targets=3)
    result = step(progress)
    assert engine.calls == ["accumulate", "total", "step"]
    record = meter.record(meter.end(result, Progress(), progress))
    assert engine.calls == ["accumulate", "total", "step"]
    assert (record["loss"], record["lr"], progress.step, progress.samples) == (2.0, 0.05, 1, 2)


@pytest.mark.parametrize("name", ["loss", "tokens", "eval_loss", "lr"])
def test_a_metric_does_not_take_the_name_of_another_number(name: str) -> None:
    engine, progress = Recording(), Progress()
    for metric in ("margin", name):
        step, meter = step_of(engine, Pairs(metric), progress, targets=3, rows=4, groups=2)
        taken = meter.end(step(progress), Progress(), progress)
        if metric == "margin":
            record = meter.record(taken)
            assert (record["loss"], record["margin"]) == (3.0, 1.5)
    with pytest.raises(StageError, match=f"a metric {name!r}, a name that each step's record has"):
        meter.record(taken)


def test_a_step_needs_what_its_loss_is_divided_by_and_no_more() -> None:
    """An objective without labels has no target tokens."""
    engine = Recording()
    step, _ = step_of(engine, Pairs(), Progress(), targets=0, rows=4, groups=2)
    assert float(step(Progress()).report.grad_norm) == 1.0
    step, _ = step_of(engine, Pairs(), Progress(), targets=3, rows=0, groups=0)
    with pytest.raises(StageError, match="step 1: no group of rows in the whole batch"):
        step(Progress())
