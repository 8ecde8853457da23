"""The order of the feed's reads."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.contracts.engine import DataAxis
from pipeline.contracts.sample_order import SampleOrder
from stages.train.batches import Feed
from stages.train.settings import BatchPlan
from tests.support.runs import toy_data


def test_a_step_asks_the_order_once(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    asked: list[tuple[int, int]] = []
    original = SampleOrder.indices

    def indices(self: SampleOrder, start: int, count: int) -> NDArray[np.int64]:
        asked.append((start, count))
        return original(self, start, count)

    monkeypatch.setattr(SampleOrder, "indices", indices)
    plan, shard = BatchPlan(global_batch_size=4, steps=9), DataAxis(index=0, count=1)
    feed = Feed(plan, toy_data(), 3, shard, torch.device("cpu"))
    for step in range(3):
        feed.targets(4 * step)
        list(feed.microbatches(4 * step))
    assert asked == [(0, 4), (4, 4), (8, 4)]
