"""Samples that are not as their set says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.contracts.data import NO_TARGET, Data, Sample, Samples
from pipeline.contracts.engine import DataAxis
from pipeline.errors import DataError
from stages.train.batches import Feed
from stages.train.evaluation import heldout
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


WRONG = [
    (Own(says=3), "sample 17 has 5 targets, and targets(17) says 3"),
    (Own(total=1), "2 samples have 10 targets, and total_targets says 11"),
    (Own(sample=sample([1] * 5, [1] * 4)), "sample 17: 5 input_ids, 4 labels"),
    (Own(sample=sample([1] * 5, [1] * 5, [0])), "sample 17: 5 input_ids, 1 positions"),
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
    data = Data(train=Own(), heldout=samples, pad_id=0, identity={})
    with pytest.raises(DataError, match=re.escape(problem)):
        list(heldout(data, ALONE, CPU, 2))


def test_samples_that_are_as_the_set_says_pass() -> None:
    assert sum(int((batch.labels >= 0).sum()) for batch, _ in trained(Own(), 1)) == 100
    three = DataAxis(index=2, count=3)  # whose last micro-batch is empty
    data = Data(train=Own(), heldout=Own(), pad_id=0, identity={})
    assert [len(batch.input_ids) for batch in heldout(data, three, CPU, 4)] == [4, 2]
