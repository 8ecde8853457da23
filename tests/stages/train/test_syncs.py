"""A step asks its device for nothing that the host has to wait for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import Precision, Progress
from pipeline.contracts.data import MicroBatch
from pipeline.contracts.objective import LossParts, Scores
from pipeline.distributed.process_group import DistContext
from stages.adapter.lora import Lora
from stages.batches.feed import Feed
from stages.fields import BatchPlan
from stages.model.hf import ActivationCheckpointing, HfModel
from stages.objectives.cross_entropy import CrossEntropy
from stages.optimizer.adamw import AdamW
from stages.train.anomalies import AnomalyMonitor
from stages.train.settings import Anomalies
from stages.train.step import StepMeter, TrainStep
from tests.support.processes import run_ranks
from tests.support.runs import TINY, context, packed_data, toy_data
from tests.support.state import WRAPS
from tests.support.syncs import Syncs

CASES: dict[str, dict[str, Any]] = {
    "ddp": {"wrap": "ddp"},
    "fsdp": {"wrap": "fsdp full"},
    "chunked": {"wrap": "fsdp full", "chunk": 16},
    "chunked replicas": {"wrap": "ddp", "chunk": 16},
    "lora": {"wrap": "fsdp full", "lora": True},
    "lora replicas": {"wrap": "ddp", "lora": True},
    "packed": {"wrap": "ddp", "packed": True},
    "packed shards": {"wrap": "fsdp full", "packed": True},
    "recomputed": {
        "wrap": "fsdp full", "model": {"activation_checkpointing": ActivationCheckpointing()},
    },
}  # fmt: skip


class Planted(CrossEntropy):
    """A loss that the host reads."""

    def __call__(self, scores: Scores, batch: MicroBatch) -> LossParts:
        parts = super().__call__(scores, batch)
        assert parts.terms["targets"].item() < 1e9
        return parts


def steps(dist: DistContext, folder: str, case: dict[str, Any], planted: bool) -> list[str]:
    """Take three steps in bf16; return what the last two waited for."""
    ctx = context(dist, folder)
    model = HfModel(config=TINY, init="random", **case.get("model", {})).run(ctx)
    if case.get("lora"):
        model = Lora(rank=2).run(ctx, model)
    precision = Precision(
        master="fp32", compute="bf16", reduce="fp32", buffer=None, loss_scaling=None
    )
    plan = AdamW(lr=1e-3, max_grad_norm=0.5).run(ctx)
    engine = WRAPS[case["wrap"]].run(ctx, model, precision, plan)
    progress = Progress()
    meter = StepMeter(engine, dist, progress)
    sizes = BatchPlan(global_batch_size=8, micro_batch_size=2, steps=9)
    data = packed_data() if case.get("packed") else toy_data()
    kind = Planted if planted else CrossEntropy
    step = TrainStep(
        engine=engine,
        objective=kind(case.get("chunk")),
        feed=Feed(sizes, data, 3, engine.data_axis, engine.device),
        plan=plan,
        monitor=AnomalyMonitor(Anomalies(), engine.total),
        meter=meter,
    )
    step(progress)  # makes the optimizer's state, and what layers keep
    with Syncs() as found:
        for _ in range(2):
            before = Progress()
            meter.launched_step(step(progress), before, progress)
    engine.close()
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_for_nothing(name: str, tmp_path: Path) -> None:
    for found in run_ranks(steps, 2, str(tmp_path), CASES[name], False):
        assert found == []


def test_a_wait_that_is_planted_is_found(tmp_path: Path) -> None:
    """It is in each of two micro-batches of two steps."""
    for found in run_ranks(steps, 2, str(tmp_path), CASES["fsdp"], True):
        assert len(found) == 4
        assert all("_local_scalar_dense" in one and "test_syncs.py" in one for one in found)


VALUES = torch.tensor([1.0, 0.0, 2.0])
WAITS: dict[str, Any] = {
    "item": lambda: VALUES[0].item(),
    "float": lambda: float(VALUES[0]),
    "int": lambda: int(VALUES[0]),
    "bool": lambda: bool(VALUES[0]),
    "if": lambda: 1 if VALUES[0] > 0 else 0,
    "tolist": lambda: VALUES.tolist(),
    "cpu": lambda: VALUES.cpu(),
    "numpy": lambda: VALUES.numpy(),
    "array": lambda: np.asarray(VALUES),
    "nonzero": lambda: VALUES.nonzero(),
    "mask": lambda: VALUES[VALUES > 0],
    "writing to a mask": lambda: VALUES.clone().__setitem__(VALUES > 0, torch.ones(2)),
    "equal": lambda: torch.equal(VALUES, VALUES),
    "unique": lambda: VALUES.unique(),
    "all": lambda: bool((VALUES > 0).all()),
}


def test_every_way_to_wait_counts() -> None:
    for name, wait in WAITS.items():
        with Syncs() as found:
            wait()
        assert found, name


def test_computing_does_not_count() -> None:
    weight = torch.ones(3, requires_grad=True)
    with Syncs() as found:
        (weight * VALUES)[1:].square().sum().backward()
        torch.where(VALUES > 0, VALUES, 0.0).to(torch.float64, non_blocking=True)[[2, 0]]
        VALUES.clone()[VALUES > 0] = 1.0
    assert found == []


class Waits(torch.autograd.Function):
    """Waits in its backward pass."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * gradient.sum().item()


def test_backward_passes_count() -> None:
    weight = torch.ones(3, requires_grad=True)
    with Syncs() as found:
        Waits.apply(weight).sum().backward()
    assert len(found) == 1
