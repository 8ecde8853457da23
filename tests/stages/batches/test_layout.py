"""Samples laid out in micro-batches, and samples that are not as their set says."""

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
from stages.batches.layout import collate, micro_batch, read
from stages.fields import BatchPlan
from stages.objectives.cross_entropy import RowLoss
from stages.train.evaluation import rows_in_order

CPU = torch.device("cpu")


def test_collate_pads_on_the_right_and_fills_an_empty_micro_batch() -> None:
    short = Sample(input_ids=np.array([1, 2]), labels=np.array([2, 3]))
    long = Sample(input_ids=np.array([4, 5, 6]), labels=np.array([-100, 6, 7]))
    batch = collate([short, long], 0, CPU)
    assert batch.input_ids.tolist() == [[1, 2, 0], [4, 5, 6]]
    assert batch.labels.tolist() == [[2, 3, -100], [-100, 6, 7]]
    empty = collate([], 8, CPU)
    assert empty.input_ids.tolist() == [[8]]
    assert empty.labels.tolist() == [[-100]]


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
    data = Data(train=samples, heldout=None, pad_id=0, packed=True, identity={})
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
    data = Data(train=Own(), heldout=samples, pad_id=0, packed=True, identity={})
    dist = DistContext(device=CPU)
    list(rows_in_order(engine, RowLoss(), data, samples, size, dist, vocabulary=16))
    return found


USUAL = sample([1] * 6, [NO_TARGET, 1, 2, 3, 4, 5])
PLACES = "(positions count the tokens of each document"
WRONG = [
    (Own(says=3), "sample 17 has 5 targets, and targets(17) says 3"),
    (Own(total=1), "2 samples have 10 targets, and total_targets says 11"),
    (Own(sample=[1]), "sample 17 is a list (`__getitem__` returns a Sample(input_ids=..., labels"),
    *((Own(sample=odd), f"sample 17{message}") for odd, message in [
        (sample([1] * 5, [1] * 4), ": 5 input_ids, 4 labels"),
        (sample([1] * 5, [1] * 5, [0]), ": 5 input_ids, 1 positions"),
        (replace(USUAL, rows={"a": np.ones(2)}), ": 1 rows, 2 a"),
        (replace(USUAL, tokens={"a": np.ones(5)}), ": 6 input_ids, 5 a"),
        (replace(USUAL, rows={"a": np.ones(1)}),
         " has columns {'a': 'float64'}, sample 16 has {}"),
        (sample([1] * 6, [-1, 1, 2, 3, 4, 5]),
         " has label -1 (-100 is the label of a position that is not trained on)"),
        (replace(USUAL, positions=np.arange(3, 9)), f" has positions [3, 4, 5, 6, 7, 8] {PLACES}"),
        (replace(USUAL, positions=np.array([0, 1, 2, 4, 0, 1])),
         f" has positions [0, 1, 2, 4, 0, 1] {PLACES}"),
    ]),
    (Own(sample=replace(USUAL, positions=np.array([0, 1, 2, 0, 1, 2]))),
     "samples [16, 17] have 3 documents, and total_rows says 2 (define total_rows"),
    *((Own(sample=replace(sample([1] * 6, [1] * 6), tokens={name: np.ones(6)})),
       f"sample 17 has a further column {name!r}, a name that is taken")
      for name in ("input_ids", "labels", "positions", "real")),
]  # fmt: skip
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


@pytest.mark.parametrize(("samples", "problem"), [*WRONG, *UNKNOWN])
def test_an_evaluation_refuses_them(samples: Own, problem: str) -> None:
    with pytest.raises(DataError, match=re.escape(problem)):
        evaluated(samples, ALONE, 2)


def test_samples_that_are_as_the_set_says_pass() -> None:
    assert sum(int((batch.labels >= 0).sum()) for batch, _ in trained(Own(), 1)) == 100
    three = DataAxis(index=2, count=3)  # whose last micro-batch is empty
    assert evaluated(Own(), three, 4) == [4, 2]


def test_documents_in_one_line_are_refused_unless_the_data_say_so() -> None:
    """Before the first step, the model is tested on packed documents only if the data say so."""
    two = sample([1] * 6, [1] * 6, [0, 1, 2, 0, 1, 2])
    one = replace(two, positions=np.arange(6))
    plain = Data(train=Own(), heldout=None, pad_id=0, identity={})
    with pytest.raises(DataError, match="sample 0 has several documents in one line"):
        read(plain, Alike(two), [0])
    assert read(plain, Alike(one), [0])
    assert read(plain, Alike(replace(two, apart=True)), [0])


class Alike(Own):
    """As many copies of a sample."""

    def __init__(self, only: Sample) -> None:
        super().__init__(sample=only)

    def __getitem__(self, index: int) -> Sample:
        return self.sample  # type: ignore[no-any-return]

    def targets(self, index: int) -> int:
        return 6

    def total_rows(self, indices: Any) -> int:
        return self.sample.documents * len(indices)  # type: ignore[no-any-return]


def test_a_filler_has_the_arguments_of_the_model_that_samples_have() -> None:
    """A tower runs on every rank or on none: its gradients are reduced over all."""
    picture = {"pixels": np.ones((2, 4), np.float32)}
    data = Data(train=Own(), heldout=None, pad_id=0, identity={})
    samples = Alike(replace(sample([1] * 6, [1] * 6), free=picture))
    batch, lengths = micro_batch(data, samples, [], 3, CPU)
    assert batch.filler
    assert not lengths
    assert batch.free["pixels"].shape == (2, 4)
    assert (batch.labels == NO_TARGET).all()
    text, _ = micro_batch(data, Own(), [], 3, CPU)
    assert text.filler
    assert text.input_ids.shape == (1, 1)
