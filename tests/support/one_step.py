"""One step of any type of model under any layout, on each rank."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.contracts.data import MicroBatch
from pipeline.distributed.process_group import DistContext
from stages.model.hf import HfModel
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from tests.support.batches import accumulated, evaluated, micro_batch
from tests.support.runs import context
from tests.support.strategies import Strategy

ROWS, LENGTH = 2, 16


def one_step(
    dist: DistContext, folder: str, model: dict[str, Any], use: str, fields: dict[str, Any]
) -> list[float]:
    """Train a step of two rows; return the mean loss before it and after it, and the gradient norm.

    `model` has the fields of model.hf.
    """
    ctx = context(dist, folder)
    precision = PrecisionPolicy(compute="fp32", reduce="fp32").run(ctx)
    plan = AdamW(lr=1e-3, max_grad_norm=None).run(ctx)
    source = HfModel(**model).run(ctx)
    engine = Strategy(use=use, fields=fields).stage().run(ctx, source, precision, plan)
    axis = engine.data_axis
    own = [_row(number) for number in range(ROWS) if number % axis.count == axis.index]
    targets = ROWS * LENGTH
    before = engine.total(accumulated(engine, own, targets))
    report = engine.step(lr_scales=[1.0])
    after = engine.total(evaluated(engine, own))
    engine.close()
    return [float(before) / targets, float(after) / targets, float(report.grad_norm)]


def _row(number: int) -> MicroBatch:
    ids = (torch.arange(LENGTH + 1)[None] * 37 + 11 * number) % 900 + 50
    return micro_batch(ids[:, :-1], ids[:, 1:].contiguous())
