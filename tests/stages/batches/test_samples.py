"""Samples that are not as their set says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.contracts.data import NO_TARGET, Data, Sample, Samples
from pipeline.contracts.engine import DataAxis
from pipeline.distributed.process_group import DistContext
from pipeline.errors import DataError
from stages.batches.feed import Feed
from stages.objectives.cross_entropy import RowLoss
from stages.objectives.rows import rows_in_order
from stages.train.settings import BatchPlan

ALONE, CPU = DataAxis(index=0, count=1), torch.device("cpu")


class Own(Samples):
    """Twenty samples of six tokens, of which five are trained on; one of them is another."""

    def __init__(self, odd: int = 17, sample: Any = None, says: int = 5, total: int = 0) -> None:
        self.odd, self.sample, self.says, self.total = odd, sample, says, total

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Sample:
        if index == self.odd and self.sample is not None:
            return self.sample  # type: ignore[no-any-return]
        return sample([1] * 6, [NO_TARGET, 1, 2, 3, 4, 5])

    def targets(self, index: int) -> int:
        return self.says if index == self.odd else 5

    def total_targets(self, indices: Any) -> int:
        return super().total_targets(indices) + self.total

    def total_rows(self, indices: Any) -> int:
        return len(indices)


def sample(ids: list[int], labels: list[int], positions: list[int] | None = None) -> Sample:
    places = None if positions is None else np.array(positions)
    return Sample(input_ids=np.array(ids), labels=np.array(labels), positions=places)


def trained(samples: Samples, workers: int) -> Iterator[Any]:
    data = Data(train=samples, heldout=None, pad_id=0, identity={})
    plan = BatchPlan(global_batch_size=4, micro_batch_size=2, steps=5, shuffle=False)
    feed = Feed(plan, data, 0, ALONE, CPU, workers=workers, vocabulary=16)
    try:
        for step in range(5):
            yield from feed.microbatches(4 * step)
    finally:
        feed.close()


def evaluated(samples: Samples, axis: DataAxis, size: int) -> list[int]:
    """Evaluate on samples; return the lines of each micro-batch of a rank."""
    found = []

    def evaluate(batches: Any, measure: Any) -> Iterator[None]:
        for batch in batches:
            found.append(len(batch.input_ids))
            yield None

    engine: Any = SimpleNamespace(
        evaluate=evaluate, total=lambda values: values, data_axis=axis, device=CPU
    )
    data = Data(train=Own(), heldout=samples, pad_id=0, identity={})
    list(rows_in_order(engine, RowLoss(), data, samples, size, DistContext(device=CPU)))
    return found


WRONG = [
    (Own(says=3), "sample 17 has 5 targets, and targets(17) says 3"),
    (Own(total=1), "2 samples have 10 targets, and total_targets says 11"),
    (Own(sample=sample([1] * 5, [1] * 4)), "sample 17: 5 input_ids, 4 labels"),
    (Own(sample=sample([1] * 5, [1] * 5, [0])), "sample 17: 5 input_ids, 1 positions"),
    (
        Own(sample=sample([1] * 6, [NO_TARGET, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2])),
        "samples [16, 17] have 3 documents, and total_rows says 2 (define total_rows",
    ),
    (
        Own(sample=replace(sample([1] * 6, [NO_TARGET, 1, 2, 3, 4, 5]), rows={"a": np.ones(2)})),
        "sample 17: 1 rows, 2 a",
    ),
    (
        Own(sample=replace(sample([1] * 6, [NO_TARGET, 1, 2, 3, 4, 5]), tokens={"a": np.ones(5)})),
        "sample 17: 6 input_ids, 5 a",
    ),
    (
        Own(sample=replace(sample([1] * 6, [NO_TARGET, 1, 2, 3, 4, 5]), rows={"a": np.ones(1)})),
        "sample 17 has columns {'a': 'float64'}, sample 16 has {}",
    ),
    (Own(sample=[1]), "sample 17 is a list (`__getitem__` returns a Sample(input_ids=..., labels"),
]
UNKNOWN = [
    (Own(sample=sample([104] * 5, [1] * 5)), "sample 17 has token 104; the model embeds 16"),
    (Own(sample=sample([1] * 5, [16] * 5)), "sample 17 has token 16; the model embeds 16"),
    (Own(sample=sample([-1] * 5, [1] * 5)), "sample 17 has token -1; the model embeds 16"),
]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("samples", "problem"), [*WRONG, *UNKNOWN])
def test_training_refuses_them(samples: Own, problem: str, workers: int) -> None:
    with pytest.raises(DataError, match=re.escape(f"{__name__}:Own: {problem}")):
        list(trained(samples, workers))


@pytest.mark.parametrize(("samples", "problem"), WRONG)
def test_an_evaluation_refuses_them(samples: Own, problem: str) -> None:
    with pytest.raises(DataError, match=re.escape(problem)):
        evaluated(samples, ALONE, 2)


def test_samples_that_are_as_the_set_says_pass() -> None:
    assert sum(int((batch.labels >= 0).sum()) for batch, _ in trained(Own(), 1)) == 100
    three = DataAxis(index=2, count=3)  # whose last micro-batch is empty
    assert evaluated(Own(), three, 4) == [4, 2]
