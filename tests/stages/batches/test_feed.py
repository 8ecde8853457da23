"""Any division of a global batch trains on the same samples in the same order; what the feed reads,
and prepares ahead."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.contracts.data import Data, Sample
from pipeline.contracts.engine import DataAxis
from pipeline.contracts.sample_order import SampleOrder
from pipeline.contracts.training import Progress
from stages.batches.feed import Feed, microbatch_ranges
from stages.fields import BatchPlan
from tests.support.runs import ToySamples, spied, toy_data
from tests.support.tier import examples
from tests.support.waiting import becomes

ALONE, CPU = DataAxis(index=0, count=1), torch.device("cpu")


@given(count=st.integers(1, 200), ranks=st.integers(1, 9), micro=st.integers(1, 12))
def test_shares_joined_in_rank_order_are_the_batch(count: int, ranks: int, micro: int) -> None:
    cuts = [microbatch_ranges(count, DataAxis(index=r, count=ranks), micro) for r in range(ranks)]
    joined = [place for cut in cuts for start, end in cut for place in range(start, end)]
    assert joined == list(range(count))
    assert len({len(cut) for cut in cuts}) == 1, "ranks must make the same collectives"
    assert all(end - start <= micro for cut in cuts for start, end in cut)
    sizes = [sum(end - start for start, end in cut) for cut in cuts]
    assert max(sizes) - min(sizes) <= 1


class Numbered(ToySamples):
    """Samples whose only token is their own index."""

    def __init__(self, size: int) -> None:
        token = np.arange(size, dtype=np.int64)
        self._samples = [Sample(input_ids=t[None], labels=t[None]) for t in token]


def seen(
    length: dict[str, float], batch: int, ranks: int, micro: int, size: int, workers: int = 0,
    first: int = 0,
) -> list[int]:  # fmt: skip
    """Return every sample that a training of this shape reads from step `first` on, in rank
    order."""
    data = Data(train=Numbered(size), heldout=None, pad_id=0, identity={})
    plan = BatchPlan(global_batch_size=batch, micro_batch_size=micro, **length)  # type: ignore[arg-type]
    feeds = [
        Feed(plan, data, 3, DataAxis(index=r, count=ranks), CPU, workers=workers)
        for r in range(ranks)
    ]
    order: list[int] = []
    for step in range(first, feeds[0].total_steps(Progress())):
        for feed in feeds:
            for piece, *_ in feed.microbatches(step * batch):
                order += [int(i) for i in piece.labels.flatten() if i >= 0]
    for feed in feeds:
        feed.close()
    return order


@examples(50)
@given(
    batch=st.integers(1, 24),
    ranks=st.integers(1, 5),
    micro=st.integers(1, 7),
    size=st.integers(1, 60),
)
def test_sample_order_does_not_depend_on_the_split(
    batch: int, ranks: int, micro: int, size: int
) -> None:
    expected = SampleOrder(3, size).indices(0, 4 * batch).tolist()
    assert seen({"steps": 4}, batch, ranks, micro, size) == expected


SHAPE = st.tuples(st.integers(1, 4), st.integers(1, 7))


@examples(30)
@given(
    shape=SHAPE,
    then=SHAPE,
    workers=st.tuples(st.sampled_from([0, 2]), st.sampled_from([0, 2])),
    resume=st.integers(0, 5),
    size=st.integers(1, 40),
)
def test_the_order_is_that_of_one_rank_wherever_and_however_it_goes_on(
    shape: tuple[int, int], then: tuple[int, int], workers: tuple[int, int], resume: int, size: int
) -> None:
    steps = {"steps": 5}
    before = seen({"steps": resume}, 8, *shape, size, workers[0]) if resume else []
    after = seen(steps, 8, *then, size, workers[1], resume)
    assert before + after == seen(steps, 8, 1, 8, size)


@given(batch=st.integers(1, 24), ranks=st.integers(1, 4), size=st.integers(1, 60))
def test_epochs_show_every_sample_equally_often(batch: int, ranks: int, size: int) -> None:
    order = seen({"epochs": 2.0}, batch, ranks, 3, size)
    assert sorted(order) == sorted([*range(size), *range(size)])


def test_micro_batches_and_targets_of_a_step() -> None:
    data = Data(train=ToySamples(20, 50, 0), heldout=None, pad_id=9, identity={})
    config = BatchPlan(global_batch_size=7, steps=1, micro_batch_size=2)
    counted = 0
    for rank in range(2):
        feed = Feed(config, data, 0, DataAxis(index=rank, count=2), CPU)
        pieces = list(feed.microbatches(0))
        assert [len(piece.labels) for piece, _ in pieces] == [[2, 2], [2, 1]][rank]
        counted += sum(int((piece.labels != -100).sum()) for piece, _ in pieces)
    assert counted == feed.unit_counts(0)["targets"]


def test_an_epoch_ends_at_its_last_sample_also_after_steps_of_another_size() -> None:
    data = Data(train=Numbered(100), heldout=None, pad_id=0, identity={})
    config = BatchPlan(global_batch_size=7, epochs=1.0)
    feed = Feed(config, data, 0, ALONE, CPU)
    assert feed.total_steps(Progress(step=5, samples=50)) == 5 + 8
    assert [feed.samples_in_step(50 + 7 * step) for step in range(8)] == [7] * 7 + [1]
    assert feed.total_steps(Progress()) == 15
    assert feed.total_steps(Progress(step=15, samples=100)) == 15


def test_a_step_asks_the_order_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = spied(monkeypatch, SampleOrder, "indices", lambda _, start, count: (start, count))
    feed = Feed(BatchPlan(global_batch_size=4, steps=9), toy_data(), 3, ALONE, CPU)
    for step in range(3):
        feed.unit_counts(4 * step)["targets"]
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


def assert_only_first_read(samples: Watched, count: int) -> None:
    """Once that many samples have been read, and with time for more, they are the first ones."""
    assert becomes(lambda: len(samples.read) >= count)
    time.sleep(0.05)
    assert sorted(index for index, _ in samples.read) == list(range(count))


@pytest.mark.parametrize("workers", [1, 3])
def test_a_bounded_number_is_prepared_ahead_over_the_end_of_a_step(workers: int) -> None:
    samples, feed = watched(workers=workers, steps=9)
    batches = feed.microbatches(0)
    for taken in range(1, 5):
        next(batches)
        assert_only_first_read(samples, taken + workers + 1)
    next(feed.microbatches(4))
    assert_only_first_read(samples, 5 + workers + 1)
    assert all(name.startswith("pipe-feed") for _, name in samples.read)
    feed.close()


def test_nothing_is_prepared_behind_the_end_of_epochs() -> None:
    samples, feed = watched(workers=2, size=6, epochs=1.0)
    assert len([*feed.microbatches(0), *feed.microbatches(4)]) == 6
    assert_only_first_read(samples, 6)
    feed.close()


def test_nothing_is_prepared_behind_the_last_step() -> None:
    samples, feed = watched(workers=2, steps=2)
    list(feed.microbatches(0, left=2))
    list(feed.microbatches(4, left=1))
    assert_only_first_read(samples, 8)
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


def test_an_error_in_looking_ahead_is_raised_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def indices(self: SampleOrder, start: int, count: int) -> NDArray[np.int64]:
        if start == 8:
            raise OSError("broken")
        return np.arange(start, start + count)

    monkeypatch.setattr(SampleOrder, "indices", indices)
    _, feed = watched(workers=1, steps=9)
    assert len([*feed.microbatches(0), *feed.microbatches(4)]) == 8
    with pytest.raises(OSError, match="broken"):
        list(feed.microbatches(8))
    assert len(list(feed.microbatches(12))) == 4
    feed.close()


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
