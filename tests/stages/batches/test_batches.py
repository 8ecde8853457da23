"""Any division of a global batch trains on the same samples in the same order."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contracts.data import Data, Sample
from pipeline.contracts.engine import DataAxis
from pipeline.contracts.sample_order import SampleOrder
from pipeline.contracts.training import Progress
from stages.batches.feed import Feed, microbatches
from stages.batches.layout import collate
from stages.train.causal_lm import TrainCausalLm
from tests.support.runs import ToySamples
from tests.support.tier import examples

CPU = torch.device("cpu")


@given(count=st.integers(1, 200), ranks=st.integers(1, 9), micro=st.integers(1, 12))
def test_shares_joined_in_rank_order_are_the_batch(count: int, ranks: int, micro: int) -> None:
    cuts = [microbatches(count, DataAxis(index=r, count=ranks), micro) for r in range(ranks)]
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
    steps: int,
    batch: int,
    ranks: int,
    micro: int,
    size: int,
    epochs: float | None,
    *,
    workers: int = 0,
    first: int = 0,
) -> list[int]:
    """Return every sample that a training of this shape reads from step `first` on, in rank
    order."""
    data = Data(train=Numbered(size), heldout=None, pad_id=0, identity={})
    config = TrainCausalLm(
        global_batch_size=batch,
        steps=None if epochs else steps,
        epochs=epochs,
        micro_batch_size=micro,
        workers=workers,
    )
    feeds = [
        Feed(config, data, 3, DataAxis(index=r, count=ranks), CPU, workers=workers)
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
    order = SampleOrder(3, size)
    expected = order.indices(0, 4 * batch).tolist()
    assert seen(4, batch, ranks, micro, size, None) == expected


def order_hash(samples: list[int]) -> str:
    return hashlib.sha256(np.array(samples, dtype="<i8").tobytes()).hexdigest()


@examples(30)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 7), st.sampled_from([0, 2])),
    then=st.tuples(st.integers(1, 4), st.integers(1, 7), st.sampled_from([0, 2])),
    resume=st.integers(0, 5),
    size=st.integers(1, 40),
)
def test_the_hash_of_the_order_is_that_of_one_rank_wherever_and_however_it_goes_on(
    shape: tuple[int, int, int], then: tuple[int, int, int], resume: int, size: int
) -> None:
    steps, batch = 5, 8
    (ranks, micro, workers), (later_ranks, later_micro, later_workers) = shape, then
    alone = seen(steps, batch, 1, 8, size, None)
    before = seen(resume, batch, ranks, micro, size, None, workers=workers) if resume else []
    after = seen(
        steps, batch, later_ranks, later_micro, size, None, workers=later_workers, first=resume
    )
    assert order_hash(before + after) == order_hash(alone)


@given(batch=st.integers(1, 24), ranks=st.integers(1, 4), size=st.integers(1, 60))
def test_epochs_show_every_sample_equally_often(batch: int, ranks: int, size: int) -> None:
    order = seen(0, batch, ranks, 3, size, 2.0)
    assert sorted(order) == sorted([*range(size), *range(size)])


def test_micro_batches_and_targets_of_a_step() -> None:
    data = Data(train=ToySamples(20, 50, 0), heldout=None, pad_id=9, identity={})
    config = TrainCausalLm(global_batch_size=7, steps=1, micro_batch_size=2)
    counted = 0
    for rank in range(2):
        feed = Feed(config, data, 0, DataAxis(index=rank, count=2), CPU)
        pieces = list(feed.microbatches(0))
        assert [len(piece.labels) for piece, _ in pieces] == [[2, 2], [2, 1]][rank]
        counted += sum(int((piece.labels != -100).sum()) for piece, _ in pieces)
    assert counted == feed.counts(0)["targets"]


def test_collate_pads_on_the_right_and_fills_an_empty_micro_batch() -> None:
    short = Sample(input_ids=np.array([1, 2]), labels=np.array([2, 3]))
    long = Sample(input_ids=np.array([4, 5, 6]), labels=np.array([-100, 6, 7]))
    batch = collate([short, long], 0, CPU)
    assert batch.input_ids.tolist() == [[1, 2, 0], [4, 5, 6]]
    assert batch.labels.tolist() == [[2, 3, -100], [-100, 6, 7]]
    empty = collate([], 8, CPU)
    assert empty.input_ids.tolist() == [[8]]
    assert empty.labels.tolist() == [[-100]]


def test_an_epoch_ends_at_its_last_sample_also_after_steps_of_another_size() -> None:
    data = Data(train=Numbered(100), heldout=None, pad_id=0, identity={})
    config = TrainCausalLm(global_batch_size=7, epochs=1.0)
    alone = DataAxis(index=0, count=1)
    feed = Feed(config, data, 0, alone, CPU)
    assert feed.total_steps(Progress(step=5, samples=50)) == 5 + 8
    assert [feed.count(50 + 7 * step) for step in range(8)] == [7] * 7 + [1]
    assert feed.total_steps(Progress()) == 15
    assert feed.total_steps(Progress(step=15, samples=100)) == 15


def test_packed_samples_keep_their_positions_and_padding_is_a_document_of_its_own() -> None:
    packed = Sample(
        input_ids=np.array([5, 6, 7]), labels=np.array([6, -100, 8]), positions=np.array([0, 1, 0])
    )
    plain = Sample(input_ids=np.array([1, 2, 3, 4]), labels=np.array([2, 3, 4, 5]))
    batch = collate([packed, plain], 0, torch.device("cpu"))
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert batch.documents == [[2, 1, 1], [4]]
    assert collate([plain], 0, torch.device("cpu")).positions is None


def test_ids_of_any_kind_of_integer_are_those_of_torch() -> None:
    narrow = np.arange(3, dtype=np.int32)
    batch = collate([Sample(input_ids=narrow, labels=narrow)], 0, CPU)
    assert (batch.input_ids.dtype, batch.labels.dtype) == (torch.int64, torch.int64)
    given = Sample(input_ids=[4, 5], labels=torch.tensor([5, 6]))  # type: ignore[arg-type]
    assert collate([given], 0, CPU).labels.tolist() == [[5, 6]]


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_not_finite_in_one_row_stays_there(packed: bool) -> None:
    ids = np.arange(4)
    positions = np.array([0, 1, 0, 1]) if packed else None
    samples = [Sample(input_ids=ids, labels=ids, positions=positions)] * (1 if packed else 2)
    batch = collate(samples, 0, CPU)
    values = torch.ones(batch.labels.shape)
    values[0, 0] = -torch.inf
    assert batch.sum_rows(values).tolist() == [-torch.inf, 2.0 if packed else 4.0]
