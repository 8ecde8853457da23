from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from pipeline.contracts.data import NO_TARGET, Samples
from pipeline.contracts.stage import Context
from pipeline.distributed.process_group import DistContext
from stages.batches.layout import collate
from stages.data.chat import ChatData
from stages.data.samples import best_fit_decreasing
from stages.data.text import TextData
from tests.stages.data.fakes import SPECIAL, FakeSource, ids
from tests.support.batches import summed_loss
from tests.support.models import filled
from tests.support.runs import context, tiny_model

FIXTURES = Path(__file__).parent / "fixtures"
CPU = torch.device("cpu")
END = SPECIAL["<|end|>"]


def packed(lengths: list[int], capacity: int) -> list[list[int]]:
    return [list(each) for each in best_fit_decreasing(np.array(lengths), capacity)]


def test_best_fit_by_hand() -> None:
    assert packed([5, 7, 3, 2, 3], 10) == [[0, 3, 4], [1, 2]]
    assert packed([6, 5, 4, 3], 10) == [[0, 2], [1, 3]]
    assert packed([4, 4, 4], 4) == [[0], [1], [2]]
    # two rooms are open when the 2 comes: the smaller one takes it
    assert packed([8, 7, 2, 3], 10) == [[0, 2], [1, 3]]


def slow_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Follow the definition: every item is tried in every bin."""
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        rooms = [capacity - sum(lengths[other] for other in each) for each in bins]
        fitting = [room for room in rooms if room >= lengths[item]]
        if fitting:
            places = [index for index, room in enumerate(rooms) if room == min(fitting)]
            bins[places[-1]].append(item)
        else:
            bins.append([item])
    return bins


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=60))
def test_best_fit_is_what_it_says(lengths: list[int]) -> None:
    found = packed(lengths, 12)
    assert sorted(item for each in found for item in each) == list(range(len(lengths)))
    assert max(sum(lengths[item] for item in each) for each in found) <= 12
    rooms = [12 - sum(lengths[item] for item in each) for each in found]
    expected = [
        12 - sum(lengths[item] for item in each) for each in slow_best_fit(lengths, 12)
    ]  # fmt: skip
    assert sorted(rooms) == sorted(expected)
    assert found == sorted(sorted(each) for each in found)


def epoch_loss(model: Any, samples: Samples) -> tuple[float, int]:
    """Return the summed loss and number of targets of every sample, in float64 over batches of
    three."""
    total, targets = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(samples), 3):
            rows = [samples[i] for i in range(start, min(start + 3, len(samples)))]
            total += float(summed_loss(model, collate(rows, 0, CPU)))
            targets += sum(int((row.labels != NO_TARGET).sum()) for row in rows)
    return total, targets


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a random Llama as in the parity tests, large enough for the fixtures."""
    fields = {"vocab_size": 259, "max_position_embeddings": 256, "initializer_range": 0.3}
    ctx = context(DistContext(device=CPU), tmp_path_factory.mktemp("run"))
    return filled(tiny_model(ctx, fields, "")).train()


@pytest.mark.parametrize("fraction", [0.0, 0.25])
def test_an_epoch_has_the_same_loss_packed_and_unpacked(
    ctx: Context,
    source: FakeSource,
    tmp_path: Path,
    model: Any,
    fraction: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    stage = ChatData(
        files=str(FIXTURES / "messages.jsonl"),
        sequence_length=200,
        heldout_fraction=fraction,
        cache=str(tmp_path / "cache"),
    )
    alone = stage.run(ctx, source)
    together = dataclasses.replace(stage, packing=True).run(ctx, source)
    assert (alone.packed, together.packed) == (False, True)
    assert alone.fingerprint != together.fingerprint
    assert 2 * len(together.train) < len(alone.train)
    assert "packing: " in caplog.text
    assert "joined no rows" not in caplog.text
    dataclasses.replace(stage, packing=True, sequence_length=40).run(ctx, source)
    assert "packing joined no rows: raise `sequence_length` (40)" in caplog.text
    pairs = [(alone.train, together.train)]
    if fraction:
        assert alone.heldout is not None
        assert together.heldout is not None
        pairs.append((alone.heldout, together.heldout))
    for apart, packs in pairs:
        expected, targets = epoch_loss(model, apart)
        found = epoch_loss(model, packs)
        assert found[1] == targets
        assert found[0] == pytest.approx(expected, rel=1e-5)
        # without the boundaries of documents the loss differs
        bare = Bare(packs)
        assert epoch_loss(model, bare)[0] != pytest.approx(expected, rel=1e-3)


class Bare(Samples):
    """Packed samples without their positions."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return dataclasses.replace(self._samples[index], positions=None)

    def targets(self, index: int) -> int:
        return self._samples.targets(index)


def test_packs_are_whole_rows(ctx: Context, source: FakeSource, tmp_path: Path) -> None:
    texts = ["abcd", "efg", "hi", "j"]  # with the end token 4, 3, 2 and 1 positions
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    stage = ChatData(
        files=str(file), sequence_length=5, packing=True, cache=str(tmp_path / "cache")
    )
    data = stage.run(ctx, source)
    samples = [data.train[index] for index in range(len(data.train))]
    assert [sample.input_ids.tolist() for sample in samples] == [ids("abcdj"), ids("efghi")]
    assert samples[0].labels.tolist() == [*ids("bcd"), END, END]
    assert samples[1].labels.tolist() == [*ids("fg"), END, *ids("i"), END]
    assert [s.positions.tolist() for s in samples if s.positions is not None] == [
        [0, 1, 2, 3, 0], [0, 1, 2, 0, 1]
    ]  # fmt: skip
    assert [data.train.targets(index) for index in range(2)] == [5, 5]
    with pytest.raises(IndexError):
        data.train[2]
    with pytest.raises(IndexError):
        data.train.targets(-1)


def text_stage(tmp_path: Path, documents: list[str], **fields: Any) -> TextData:
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return TextData(files=str(file), cache=str(tmp_path / "cache"), **fields)


def test_documents_of_a_stream_apart(ctx: Context, source: FakeSource, tmp_path: Path) -> None:
    stage = text_stage(tmp_path, ["abc", "de"], sequence_length=3, documents_apart=True)
    data = stage.run(ctx, source)
    assert data.packed
    # a b c | end d e | end: the end of the first document predicts nothing
    samples = [data.train[index] for index in range(len(data.train))]
    assert [s.input_ids.tolist() for s in samples] == [ids("abc"), [END, *ids("de")]]
    assert [s.labels.tolist() for s in samples] == [
        [*ids("bc"), END], [NO_TARGET, *ids("e"), END]
    ]  # fmt: skip
    assert [s.positions.tolist() for s in samples if s.positions is not None] == [
        [0, 1, 2], [0, 0, 1]
    ]  # fmt: skip
    assert [data.train.targets(index) for index in range(2)] == [3, 2]
    assert data.fingerprint != dataclasses.replace(stage, documents_apart=False).run(
        ctx, source
    ).fingerprint  # fmt: skip


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_a_document_without_a_token_is_no_border(
    ctx: Context, source: FakeSource, tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.data.documents._BATCH", batch)
    source.fast.backend_tokenizer.normalizer = normalizers.Replace("x", "")
    stage = text_stage(
        tmp_path, ["x", "ab", "x", "xx", "cd", "x"], sequence_length=3, documents_apart=True,
        append_eos=False,
    )  # fmt: skip
    samples = stage.run(ctx, source).train
    assert len(samples) == 1
    sample = samples[0]
    assert sample.input_ids.tolist() == ids("abc")
    assert sample.labels.tolist() == [*ids("b"), NO_TARGET, *ids("d")]
    assert sample.positions is not None
    assert sample.positions.tolist() == [0, 1, 0]
    assert samples.targets(0) == 2


@given(
    documents=st.lists(st.text("abc", min_size=1, max_size=7), min_size=2, max_size=8),
    length=st.integers(1, 9),
)
def test_documents_apart_are_told_by_the_index_alone(documents: list[str], length: int) -> None:
    from stages.data.samples import TokenBlocks

    stream = np.array([token for text in documents for token in [*ids(text), END]])
    starts = np.cumsum([0, *(len(text) + 1 for text in documents)])[:-1]
    blocks = TokenBlocks(stream, length, starts=starts)
    place = np.concatenate([np.arange(len(text) + 1) for text in documents])
    at = 0
    for index in range(len(blocks)):
        sample = blocks[index]
        assert blocks.targets(index) == int((sample.labels != NO_TARGET).sum())
        for offset, label in enumerate(sample.labels):
            assert (label == NO_TARGET) == (place[at + offset + 1] == 0)
            assert sample.positions is not None
            assert sample.positions[offset] == min(place[at + offset], offset)
        at += len(sample.labels)


def test_documents_apart_have_the_loss_of_documents_alone(
    ctx: Context, source: FakeSource, tmp_path: Path, model: Any
) -> None:
    documents = ["first one", "the second", "3", "and the last document of them"]
    one = text_stage(tmp_path, documents, sequence_length=100, documents_apart=True)
    together = epoch_loss(model, one.run(ctx, source).train)
    alone = [
        epoch_loss(model, text_stage(tmp_path, [text], sequence_length=100).run(ctx, source).train)
        for text in documents
    ]
    assert together[1] == sum(targets for _, targets in alone)
    assert together[0] == pytest.approx(sum(loss for loss, _ in alone), rel=1e-5)
