"""The order of the feed's reads, and what it prepares ahead."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipeline.contracts.data import Data, Sample
from pipeline.contracts.engine import DataAxis
from pipeline.contracts.sample_order import SampleOrder
from stages.batches.feed import Feed
from stages.batches.settings import BatchPlan
from tests.support.runs import ToySamples, toy_data

ALONE, CPU = DataAxis(index=0, count=1), torch.device("cpu")


def test_a_step_asks_the_order_once(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    asked: list[tuple[int, int]] = []
    original = SampleOrder.indices

    def indices(self: SampleOrder, start: int, count: int) -> NDArray[np.int64]:
        asked.append((start, count))
        return original(self, start, count)

    monkeypatch.setattr(SampleOrder, "indices", indices)
    feed = Feed(BatchPlan(global_batch_size=4, steps=9), toy_data(), 3, ALONE, CPU)
    for step in range(3):
        feed.counts(4 * step)["targets"]
        list(feed.microbatches(4 * step))
    assert asked == [(0, 4), (4, 4), (8, 4)]


class Watched(ToySamples):
    """Samples that note which of them were read, and by which thread."""

    def __init__(self, size: int) -> None:
        super().__init__(size, 99, 1)
        self.read: list[tuple[int, str]] = []

    def __getitem__(self, index: int) -> Sample:
        self.read.append((index, threading.current_thread().name))
        return super().__getitem__(index)


def watched(*, workers: int, size: int = 40, **fields: float) -> tuple[Watched, Feed]:
    """Return samples, and a feed of one sample a micro-batch in file order."""
    samples = Watched(size)
    plan = BatchPlan(global_batch_size=4, micro_batch_size=1, shuffle=False, **fields)  # type: ignore[arg-type]
    data = Data(train=samples, heldout=None, pad_id=0, identity={})
    return samples, Feed(plan, data, 3, ALONE, CPU, workers=workers)


def settled(samples: Watched) -> list[int]:
    """Return what has been read once nothing more is."""
    count = -1
    while count != len(samples.read):
        count = len(samples.read)
        time.sleep(0.05)
    return [index for index, _ in samples.read]


@pytest.mark.parametrize("workers", [1, 3])
def test_a_bounded_number_is_prepared_ahead_over_the_end_of_a_step(workers: int) -> None:
    samples, feed = watched(workers=workers, steps=9)
    batches = feed.microbatches(0)
    for taken in range(1, 5):
        next(batches)
        assert sorted(settled(samples)) == list(range(taken + workers + 1))
    next(feed.microbatches(4))
    assert sorted(settled(samples)) == list(range(5 + workers + 1))
    assert all(name.startswith("pipe-feed") for _, name in samples.read)
    feed.close()


def test_nothing_is_prepared_behind_the_end_of_epochs() -> None:
    samples, feed = watched(workers=2, size=6, epochs=1.0)
    assert len([*feed.microbatches(0), *feed.microbatches(4)]) == 6
    assert sorted(settled(samples)) == [0, 1, 2, 3, 4, 5]
    feed.close()


def test_nothing_is_prepared_behind_the_last_step() -> None:
    samples, feed = watched(workers=2, steps=2)
    list(feed.microbatches(0, left=2))
    list(feed.microbatches(4, left=1))
    assert sorted(settled(samples)) == list(range(8))
    feed.close()


def test_another_position_than_the_next_drops_what_was_prepared() -> None:
    """As behind a batch that is skipped, or when training goes back."""
    samples, feed = watched(workers=1, steps=9)
    list(feed.microbatches(0))
    for position in (8, 0):
        found = [batch.input_ids[0].tolist() for batch, _ in feed.microbatches(position)]
        whole = [samples[index].input_ids.tolist() for index in range(position, position + 4)]
        assert found == whole
    feed.close()


class Broken(Watched):
    """Samples one of which cannot be read."""

    def __getitem__(self, index: int) -> Sample:
        if index == 5:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_thread_comes_with_the_micro_batch_that_it_is_of(workers: int) -> None:
    plan = BatchPlan(global_batch_size=4, micro_batch_size=1, shuffle=False, steps=9)
    data = Data(train=Broken(40), heldout=None, pad_id=0, identity={})
    feed = Feed(plan, data, 3, ALONE, CPU, workers=workers)
    list(feed.microbatches(0))
    following = feed.microbatches(4)
    next(following)
    with pytest.raises(OSError, match="the disk is gone"):
        next(following)
    feed.close()
