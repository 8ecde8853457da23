"""One optimizer step, and when its numbers are asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from pipeline import DistContext, Heartbeat, Progress, StepReport
from pipeline.contracts.objective import LossParts
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
        return LossParts(terms={"targets": torch.tensor(6.0)})

    def total(self, values: torch.Tensor) -> torch.Tensor:
        self.calls.append("total")
        return values

    def step(self, **options: Any) -> StepReport:
        self.calls.append("step")
        return StepReport(grad_norm=1.0, applied=True)


def test_the_sums_are_asked_for_before_the_update_and_read_behind_it() -> None:
    """So what the host waits for are the gradients, and not the update."""
    engine: Any = Recording()
    feed: Any = SimpleNamespace(
        counts=lambda position, units=(): {"targets": 3}, count=lambda position: 2,
        microbatches=lambda position: [], total_steps=lambda progress: 9,
    )  # fmt: skip
    plan: Any = SimpleNamespace(
        lr_scales=lambda step, total: [0.5], rates=lambda scales: {"lr": 0.1 * scales[0]},
    )  # fmt: skip
    progress = Progress()
    meter = StepMeter(engine, DistContext(device=engine.device), progress)
    step = TrainStep(
        engine=engine,
        objective=CrossEntropy(),
        feed=feed,
        plan=plan,
        monitor=AnomalyMonitor(Anomalies(), engine.total),
        observe=meter.observe,
        heartbeat=Heartbeat(),
    )
    result = step(progress)
    assert engine.calls == ["accumulate", "total", "step"]
    record = meter.record(meter.end(result, Progress(), progress))
    assert engine.calls == ["accumulate", "total", "step"]
    assert (record["loss"], record["lr"], progress.step, progress.samples) == (2.0, 0.05, 1, 2)
