"""Micro-batches on their way through a model that ranks of a group run together."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from pipeline.contracts.objective import Scores
from pipeline.distributed.process_group import DistContext
from stages.objectives.cross_entropy import CrossEntropy, RowLoss, StepSums
from stages.wrap.axes import Axes
from stages.wrap.passes import ModulePasses
from tests.support.batches import micro_batch


def three(own: Any, whole: Any, request: Any) -> Scores:
    """Score the two tokens of a micro-batch."""
    return Scores(total=torch.tensor(-3.0), tokens=torch.tensor([[-1.0, -2.0]]))


@pytest.mark.parametrize("axes", [Axes(data=2, tensor=2), Axes(data=2, context=2)])
def test_a_loss_that_a_group_computes_alike_counts_once(axes: Axes) -> None:
    parts, rows, lasts = [], [], list[bool]()
    ids = torch.zeros(1, 2, dtype=torch.int64)

    def around(last: bool) -> Any:
        lasts.append(last)
        return nullcontext()

    for rank in range(4):
        dist = DistContext(rank=rank, world_size=4, device=torch.device("cpu"))
        passes = ModulePasses(torch.nn.Linear(1, 1), three, dist, axes)
        sums = StepSums(CrossEntropy(), dist.device, {"targets": 1}, factor=1.0)
        batches = [micro_batch(ids, ids)] * 2
        found = passes.train(batches, sums, around, lambda loss: None)
        parts.append(float(found.terms["targets"]))
        rows += passes.evaluate([micro_batch(ids, ids)], RowLoss())
    assert parts == [6.0, 0.0, 6.0, 0.0]
    assert lasts == [False, True] * 4
    assert [None if one is None else one.tolist() for one in rows] == [[[3.0]], None] * 2
