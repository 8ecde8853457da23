"""Compiled functions and blocks, and what attention is told of packed documents."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.utils import counters
from transformers import masking_utils
from transformers import modeling_flash_attention_utils as flash

from pipeline import MicroBatch
from stages.batches.layout import pad, sequence_slice
from stages.objectives import compat
from stages.objectives.compat import (
    CompiledBlocks,
    compiled,
    flash_documents,
    has_several,
    known_documents,
)
from tests.support.batches import micro_batch
from tests.support.syncs import Syncs


@pytest.fixture(autouse=True)
def _few_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(compat, "GRAPHS", 2)
    monkeypatch.setattr(logging.getLogger("pipe"), "propagate", True)
    with torch._dynamo.config.patch(recompile_limit=2):
        yield
    torch._dynamo.reset()


def doubled(values: torch.Tensor) -> torch.Tensor:
    return values * 2


def test_a_function_that_torch_gives_up_on_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    for backend in ("eager", "eager"):  # installed twice, told once
        function = compiled(doubled, backend=backend, dynamic=False)
    for length in range(2, 8):
        assert torch.equal(function(torch.ones(length)), torch.full((length,), 2.0))
    told = [record.getMessage() for record in caplog.records if record.name == "pipe"]
    assert len(told) == 1
    assert told[0].startswith("torch has compiled doubled 2 times, and computes what is new")


def broken(values: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break(msg="a hook")
    return values * 2


@pytest.mark.parametrize(("block", "words"), [(doubled, 0), (broken, 1)])
def test_blocks_in_pieces_are_told_once(
    block: Callable[..., torch.Tensor], words: int, caplog: pytest.LogCaptureFixture
) -> None:
    shared = CompiledBlocks(finds_lengths=True)
    for _ in range(2):
        shared.forward(block, backend="eager")(torch.ones(2, 3))
    told = [record.getMessage() for record in caplog.records if record.name == "pipe"]
    assert len(told) == words
    assert all("a hook" in message for message in told)


def test_tensors_may_be_named() -> None:
    block = CompiledBlocks(finds_lengths=True).forward(doubled, backend="eager")
    for length in (2, 5, 4):
        assert block(values=torch.ones(2, length)).shape == (2, length)
    assert counters["stats"]["unique_graphs"] == 2


def test_a_higher_limit_is_not_lowered() -> None:
    with torch._dynamo.config.patch(recompile_limit=1000):
        compiled(doubled, backend="eager")
        assert torch._dynamo.config.recompile_limit == 1000


POSITIONS = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
LENGTHS = [[3, 2], [1, 4]]


def model(attention: str) -> nn.Module:
    module: Any = nn.Linear(1, 1)
    module.config = SimpleNamespace(_attn_implementation=attention)
    return nn.Sequential(module)


def packed(lengths: Any, *, known: bool = True) -> MicroBatch:
    """Return a micro-batch of documents of these lengths, by sample."""
    rows = [torch.cat([torch.arange(size) for size in row]) for row in lengths]
    positions = torch.stack(rows)
    labels = torch.zeros_like(positions)
    documents = lengths if known else None
    return micro_batch(labels, labels, positions=positions, documents=documents)


def lengths_in(positions: torch.Tensor) -> list[list[int]]:
    """Return the lengths of documents by the positions alone."""
    found = []
    for row in positions:
        starts = [*(row == 0).nonzero().flatten().tolist(), len(row)]
        found.append([end - start for start, end in itertools.pairwise(starts)])
    return found


@pytest.mark.parametrize("known", [True, False])
def test_documents_begin_where_positions_do(known: bool) -> None:
    batch = packed(LENGTHS, known=known)
    assert batch.positions is not None
    assert torch.equal(batch.positions, POSITIONS)
    with known_documents(batch), Syncs() as waits:
        told = flash_documents(model("flash_attention_2"), batch.positions)
    assert bool(waits) != known
    assert told["cu_seq_lens_q"].tolist() == [0, 3, 5, 6, 10]
    assert told["cu_seq_lens_q"].dtype == torch.int32
    assert told["cu_seq_lens_k"].tolist() == told["cu_seq_lens_q"].tolist()
    assert (told["max_length_q"], told["max_length_k"]) == (4, 4)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
def test_other_attention_is_told_nothing(attention: str) -> None:
    assert flash_documents(model(attention), torch.zeros(1, 3)) == {}


@pytest.mark.parametrize(
    ("batch", "several"),
    [
        (packed(LENGTHS), True),
        (packed([[5], [5]]), False),
        (micro_batch(torch.zeros(1, 5), torch.zeros(1, 5)), False),
        (packed(LENGTHS, known=False), None),
        (packed([[5]], known=False), None),
    ],
    ids=["several", "one each", "no positions", "unknown", "unknown, one each"],
)
def test_transformers_finds_the_same_documents_and_does_not_look(
    batch: MicroBatch, several: bool | None
) -> None:
    """It would look at those of models that make their positions themselves too."""
    assert has_several(batch) is several
    positions = torch.arange(5)[None] if batch.positions is None else batch.positions
    expected = masking_utils.find_packed_sequence_indices(positions)
    with known_documents(batch), Syncs() as waits:
        found = masking_utils.find_packed_sequence_indices(positions)
        if several is False:
            assert not flash._is_packed_sequence(positions[:1], batch_size=1)
    assert bool(waits) == (several is None)
    assert (found is None) == (expected is None)
    assert found is None or torch.equal(found, expected)


def test_nothing_is_known_behind_a_micro_batch() -> None:
    before = masking_utils.find_packed_sequence_indices, flash._is_packed_sequence
    with known_documents(packed([[5]])):
        assert masking_utils.find_packed_sequence_indices is not before[0]
    with pytest.raises(KeyError), known_documents(packed([[5]])):
        raise KeyError
    assert (masking_utils.find_packed_sequence_indices, flash._is_packed_sequence) == before
    told = flash_documents(model("flash_attention_2"), torch.tensor([[0, 1, 0]]))
    assert told["cu_seq_lens_q"].tolist() == [0, 2, 3]


def test_of_several_micro_batches_only_what_holds_of_all_is_known() -> None:
    before = masking_utils.find_packed_sequence_indices
    with known_documents(packed(LENGTHS), packed([[5], [5]])):
        assert masking_utils.find_packed_sequence_indices is before
        told = flash_documents(model("flash_attention_2"), torch.tensor([[0, 0]]))
        assert told["cu_seq_lens_q"].tolist() == [0, 1, 2]
    with known_documents(packed([[5]]), packed([[5], [5]])):
        assert masking_utils.find_packed_sequence_indices is not before


ROWS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=3)


@given(rows=ROWS, samples=st.integers(0, 2), more=st.integers(0, 3), known=st.booleans())
def test_padding_and_slices_keep_the_lengths(
    rows: list[list[int]], samples: int, more: int, known: bool
) -> None:
    longest = max(map(sum, rows))
    even = [[*row, longest - sum(row)] if sum(row) < longest else row for row in rows]
    batch = packed(even, known=known)
    longer = pad(batch, len(even) + samples, longest + more, packed=True)
    assert longer.positions is not None
    assert longer.documents == (lengths_in(longer.positions) if known else None)
    assert sequence_slice(longer, 0, 1).documents == longer.documents


@given(rows=st.integers(1, 3), samples=st.integers(0, 2), more=st.integers(0, 3))
def test_a_sample_that_is_no_packed_one_is_one_document(rows: int, samples: int, more: int) -> None:
    ids = torch.zeros(rows, 4, dtype=torch.int64)
    batch = micro_batch(ids, ids)
    longer = pad(batch, rows + samples, 4 + more, packed=True)
    whole = sequence_slice(batch, 1, 2)
    for one in (longer, whole):
        assert one.positions is not None
        assert one.documents == lengths_in(one.positions)
