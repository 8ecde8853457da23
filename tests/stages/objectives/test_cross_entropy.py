"""Sums of an objective, as a step adds them up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.contracts.objective import LossParts, ScoreRequest, Scores
from pipeline.errors import StageError
from stages.objectives.cross_entropy import StepSums
from tests.support.batches import micro_batch


class Fixed:
    """An objective that returns what it is told."""

    request = ScoreRequest(total=True)
    units = ("rows",)
    metrics: Any = {"margin": "rows"}

    def __init__(self, term: Tensor, value: Tensor) -> None:
        self.parts = LossParts(terms={"rows": term}, sums={"margin": value})

    def __call__(self, scores: Scores, batch: Any) -> LossParts:
        return self.parts


def judged(term: Tensor, value: Tensor) -> tuple[Tensor, LossParts]:
    sums = StepSums(Fixed(term, value), torch.device("cpu"), {"rows": 4.0}, factor=2.0)
    batch = micro_batch(torch.ones(1, 3, dtype=torch.int64), torch.ones(1, 3, dtype=torch.int64))

    def scorer(*given: Any, **inputs: Any) -> Scores:
        return Scores(total=torch.zeros(()))

    return sums.judge(scorer, batch, batch), sums.part(counted=True)


def test_sums_are_of_one_dtype_on_every_rank() -> None:
    """Columns of numpy are often fp64, and ranks without rows add zeros of fp32."""
    loss, part = judged(torch.tensor(6.0, dtype=torch.float64), torch.tensor(3))
    assert (loss.item(), loss.dtype) == (3.0, torch.float32)
    found = [part.terms["rows"], part.sums["margin"]]
    assert [(one.item(), one.dtype) for one in found] == [
        (6.0, torch.float32),
        (3.0, torch.float32),
    ]


@pytest.mark.parametrize("odd", [0, 1])
def test_a_sum_that_is_no_scalar_is_refused(odd: int) -> None:
    given = [torch.ones(()), torch.ones(())]
    given[odd] = torch.ones(2)
    name = ("rows", "margin")[odd]
    with pytest.raises(StageError, match=rf"an objective's {name} has shape \(2,\)"):
        judged(*given)
