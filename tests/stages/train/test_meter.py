"""Numbers of a step, where several devices run one share of the samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.contracts.engine import StepReport
from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from stages.batches.feed import BatchStats
from stages.train.flops import Cost
from stages.train.meter import StepMeter
from stages.train.step import StepResult


def test_tokens_of_a_group_count_once_and_its_devices_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four devices run two shares of samples: 14 tokens, not 28."""
    others = 3  # whose sums are like this rank's, but for the loss
    engine: Any = SimpleNamespace(
        data_axis=SimpleNamespace(count=2), device=torch.device("cpu"),
        total=lambda sums: sums + others * torch.cat([torch.zeros(1), sums[1:]]),
    )  # fmt: skip
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: None)
    dist = DistContext(rank=0, world_size=4, device=torch.device("cpu"))
    meter = StepMeter(engine, dist, Progress(), Cost(multiplied=1.0, attention=0.0, peak=1.0))
    report = StepReport(grad_norm=1.0, applied=True)
    done = StepResult(report=report, rates={"lr": 0.1}, stats=BatchStats(tokens=7), anomaly="")
    meter.observe(torch.tensor(2.0), done.stats, {})
    record = meter.record(meter.end(done, Progress(), Progress(step=1)))
    tokens = record["tokens_per_second"] * record["step_seconds"]
    assert tokens == pytest.approx(14)
    assert record["mfu"] * record["step_seconds"] == pytest.approx(14 / 4)
    assert record["tokens_per_second_per_rank"] == pytest.approx(record["tokens_per_second"] / 4)
