"""Samples laid out as lines of tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.contracts.data import Sample
from stages.batches.layout import collate

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
