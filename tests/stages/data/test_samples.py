"""Rows, packed rows, blocks of a stream and mixtures of them: what they hold, and how much of it is
known without reading sample by sample."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from pipeline import NO_TARGET, Sample, Samples
from pipeline.distributed.process_group import DistContext
from stages.batches.layout import collate
from stages.data.samples import CountedSamples, Mixture, TokenBlocks, best_fit_decreasing, mixed
from stages.data.sources import Source
from tests.stages.data.conftest import Chats
from tests.stages.data.fakes import SPECIAL, FakeSource, ids
from tests.support.batches import summed_loss
from tests.support.models import filled
from tests.support.runs import context, tiny_model

FIXTURES = Path(__file__).parent / "fixtures"
CPU = torch.device("cpu")
END = SPECIAL["<|end|>"]


def every(samples: Samples) -> list[Sample]:
    return [samples[index] for index in range(len(samples))]


def positions(samples: Samples) -> list[list[int]]:
    return [each.positions.tolist() for each in every(samples) if each.positions is not None]


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
    found, total = every(samples), 0.0
    with torch.no_grad():
        for start in range(0, len(found), 3):
            total += float(summed_loss(model, collate(found[start : start + 3], 0, CPU)))
    return total, sum(int((each.labels != NO_TARGET).sum()) for each in found)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a random Llama as in the parity tests, large enough for the fixtures."""
    fields = {"vocab_size": 259, "max_position_embeddings": 256, "initializer_range": 0.3}
    ctx = context(DistContext(device=CPU), tmp_path_factory.mktemp("run"))
    return filled(tiny_model(ctx, fields, "")).train()


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


@pytest.mark.parametrize("fraction", [0.0, 0.25])
def test_an_epoch_has_the_same_loss_packed_and_unpacked(
    chats: Chats, model: Any, fraction: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fields: Any = {"files": str(FIXTURES / "messages.jsonl"), "heldout_fraction": fraction}
    alone = chats.run(**fields, sequence_length=200)
    together = chats.run(**fields, sequence_length=200, packing=True)
    assert (alone.packed, together.packed) == (False, True)
    assert alone.fingerprint != together.fingerprint
    assert 2 * len(together.train) < len(alone.train)
    assert "packing: " in caplog.text
    assert "joined no rows" not in caplog.text
    chats.run(**fields, packing=True, sequence_length=40)
    assert "packing joined no rows: raise `sequence_length` (40)" in caplog.text
    pairs = [(alone.train, together.train)]
    if fraction:
        assert alone.heldout is not None
        assert together.heldout is not None
        pairs.append((alone.heldout, together.heldout))
    for apart, packs in pairs:
        expected, targets = epoch_loss(model, apart)
        found = epoch_loss(model, packs)
        assert found == (pytest.approx(expected, rel=1e-5), targets)
        # without the boundaries of documents the loss differs
        assert epoch_loss(model, Bare(packs))[0] != pytest.approx(expected, rel=1e-3)


def test_packs_are_whole_rows(chats: Chats) -> None:
    texts = ["abcd", "efg", "hi", "j"]  # with the end token 4, 3, 2 and 1 positions
    rows = ({"text": text} for text in texts)
    train = chats.run(*rows, sequence_length=5, packing=True).train
    samples = every(train)
    assert [sample.input_ids.tolist() for sample in samples] == [ids("abcdj"), ids("efghi")]
    assert samples[0].labels.tolist() == [*ids("bcd"), END, END]
    assert samples[1].labels.tolist() == [*ids("fg"), END, *ids("i"), END]
    assert positions(train) == [[0, 1, 2, 3, 0], [0, 1, 2, 0, 1]]
    assert [train.targets(index) for index in range(2)] == [5, 5]
    with pytest.raises(IndexError):
        train[2]
    with pytest.raises(IndexError):
        train.targets(-1)


def test_documents_of_a_stream_apart(chats: Chats) -> None:
    data = chats.text("abc", "de", sequence_length=3, documents_apart=True)
    assert data.packed
    # a b c | end d e | end: the end of the first document predicts nothing
    samples = every(data.train)
    assert [s.input_ids.tolist() for s in samples] == [ids("abc"), [END, *ids("de")]]
    assert [s.labels.tolist() for s in samples] == [
        [*ids("bc"), END], [NO_TARGET, *ids("e"), END]
    ]  # fmt: skip
    assert positions(data.train) == [[0, 1, 2], [0, 0, 1]]
    assert [data.train.targets(index) for index in range(2)] == [3, 2]
    assert data.fingerprint != chats.text("abc", "de", sequence_length=3).fingerprint


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_a_document_without_a_token_is_no_border(
    chats: Chats, source: FakeSource, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.data.documents._BATCH", batch)
    source.fast.backend_tokenizer.normalizer = normalizers.Replace("x", "")
    samples = chats.text(
        "x", "ab", "x", "xx", "cd", "x", source=source, sequence_length=3, documents_apart=True,
        append_eos=False,
    ).train  # fmt: skip
    (sample,) = every(samples)
    assert sample.input_ids.tolist() == ids("abc")
    assert sample.labels.tolist() == [*ids("b"), NO_TARGET, *ids("d")]
    assert positions(samples) == [[0, 1, 0]]
    assert samples.targets(0) == 2


@given(
    documents=st.lists(st.text("abc", min_size=1, max_size=7), min_size=2, max_size=8),
    length=st.integers(1, 9),
)
def test_documents_apart_are_told_by_the_index_alone(documents: list[str], length: int) -> None:
    stream = np.array([token for text in documents for token in [*ids(text), END]])
    starts = np.cumsum([0, *(len(text) + 1 for text in documents)])[:-1]
    blocks = TokenBlocks(stream, length, starts=starts)
    place = np.concatenate([np.arange(len(text) + 1) for text in documents])
    at = 0
    for index, sample in enumerate(every(blocks)):
        assert blocks.targets(index) == int((sample.labels != NO_TARGET).sum())
        for offset, label in enumerate(sample.labels):
            assert (label == NO_TARGET) == (place[at + offset + 1] == 0)
            assert sample.positions is not None
            assert sample.positions[offset] == min(place[at + offset], offset)
        at += len(sample.labels)


def test_documents_apart_have_the_loss_of_documents_alone(chats: Chats, model: Any) -> None:
    documents = ["first one", "the second", "3", "and the last document of them"]
    fields: Any = {"sequence_length": 100}
    together = epoch_loss(model, chats.text(*documents, **fields, documents_apart=True).train)
    alone = [epoch_loss(model, chats.text(text, **fields).train) for text in documents]
    assert together[1] == sum(targets for _, targets in alone)
    assert together[0] == pytest.approx(sum(loss for loss, _ in alone), rel=1e-5)


class Numbers(CountedSamples):
    """`count` samples, each with its own number as its only token, from `first` on."""

    def __init__(self, first: int, count: int) -> None:
        self._numbers, self.size = np.arange(first, first + count), count

    def __getitem__(self, index: int) -> Sample:
        number = self._numbers[self.within(index) : index + 1]
        return Sample(input_ids=number, labels=number)

    def counted(self, indices: Any) -> Any:
        return np.array([self._numbers[indices].sum(), len(indices)])


def content(samples: Samples) -> list[int]:
    return [int(sample.input_ids[0]) for sample in every(samples)]


@pytest.mark.parametrize(
    ("sizes", "weights", "shares"),
    [
        ([10, 10], [1, 1], [10, 10]),
        ([10, 90], [1, 1], [90, 90]),
        ([10, 90], [0.75, 0.25], [270, 90]),
        ([3, 5, 7], [0.2, 0.3, 0.5], [3, 5, 8]),
    ],
)
def test_shares_by_hand(sizes: list[int], weights: list[float], shares: list[int]) -> None:
    parts = [Numbers(1000 * number, size) for number, size in enumerate(sizes)]
    found = Counter(number // 1000 for number in content(mixed(parts, weights)))
    assert [found[number] for number in range(len(sizes))] == shares


def test_what_is_repeated_is_repeated_evenly() -> None:
    mixture = mixed([Numbers(0, 2), Numbers(100, 5)], [1, 1])
    assert content(mixture) == [0, 0, 0, 1, 1, 100, 101, 102, 103, 104]
    assert mixture.targets(4) == 1
    with pytest.raises(IndexError):
        mixture[10]
    assert content(mixed([Numbers(0, 2), Numbers(9, 1)])) == [0, 1, 9]


@given(
    sources=st.lists(
        st.tuples(st.integers(1, 40), st.floats(0.05, 20)), min_size=1, max_size=5
    )
)  # fmt: skip
def test_an_epoch_holds_every_sample_and_the_shares_are_the_weights(
    sources: list[tuple[int, float]],
) -> None:
    sizes, weights = zip(*sources, strict=True)
    parts = [Numbers(1000 * number, size) for number, size in enumerate(sizes)]
    mixture = mixed(parts, weights)
    seen = Counter(content(mixture))
    assert set(seen) == {1000 * n + i for n, size in enumerate(sizes) for i in range(size)}
    counts = [sum(seen[1000 * n + i] for i in range(size)) for n, size in enumerate(sizes)]
    scale = max(size / weight for size, weight in sources)
    for number, (count, weight, size) in enumerate(zip(counts, weights, sizes, strict=True)):
        assert abs(count - scale * weight) <= 0.5 + 1e-6 * count
        times = [seen[1000 * number + i] for i in range(size)]
        assert max(times) - min(times) <= 1


def letters(samples: Samples | None) -> str:
    """Return the first token of each sample as a letter."""
    assert samples is not None
    return "".join(chr(33 + int(sample.input_ids[0])) for sample in every(samples))


def test_sources_are_mixed(chats: Chats, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first, second = (
        chats.stage(*({"text": f"{letter}."} for letter in text), name=f"{text}.jsonl").files
        for text in ("abcd", "xyz")
    )
    both = (Source(files=first), Source(files=second, weight=2))
    data = chats.run(files=(), sources=both, heldout_fraction=0.25)
    assert (letters(data.train), letters(data.heldout)) == ("abcxxxyyy", "dz")
    assert "abcd.jsonl: 4 rows (text), 12 tokens, 8 trained on" in caplog.text
    assert "xyz.jsonl: 3 rows (text), 9 tokens, 6 trained on" in caplog.text
    held = chats.run(files=(), sources=both[:1], heldout_sources=both[1:])
    assert (letters(held.train), letters(held.heldout)) == ("abcd", "xyz")
    prints = {chats.run(files=first).fingerprint} | {
        chats.run(files=(), sources=(both[0], Source(files=second, weight=weight))).fingerprint
        for weight in (1.0, 2.0)
    }
    assert len(prints) == 3
    assert len(list((chats.folder / "cache").iterdir())) == 2


def test_text_sources(chats: Chats, tmp_path: Path) -> None:
    for name, text in (("a", "abcdefgh"), ("b", "xy")):
        (tmp_path / f"{name}.txt").write_text(text)
    sources = tuple(Source(files=str(tmp_path / f"{name}.txt")) for name in "ab")
    data = chats.text(files=(), sources=sources, append_eos=False, sequence_length=2)
    labels = [sample.labels.tolist() for sample in every(data.train)]
    assert labels == [ids("bc"), ids("de"), ids("fg"), ids("h"), *[ids("y")] * 4]


WORDS = ["abcd", "efg", "hi", "jklmnop", "q", "rstuv", "wx"]
KINDS = ("rows", "packed rows", "blocks", "blocks after others", "a mixture")


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_at_once(kind: str, chats: Chats, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [{"prompt": word, "completion": word[: 1 + n]} for n, word in enumerate(WORDS)]
    rows = chats.run(
        *pairs, sequence_length=30, packing=kind == "packed rows", template=False
    ).train
    held = 0.6 if kind == "blocks after others" else 0.0
    text = chats.text(*WORDS, sequence_length=4, documents_apart=True, heldout_fraction=held)
    samples = {"rows": rows, "packed rows": rows, "blocks": text.train}.get(kind, text.heldout)
    samples = Mixture([rows, text.train], [9, 20]) if kind == "a mixture" else samples
    assert samples is not None
    indices = np.append(np.array([1, 0, 1, 2, 2, 2]) % len(samples), len(samples) - 1)
    expected = sum(samples.targets(index) for index in indices.tolist())
    assert expected > 0
    for place in {type(samples), *map(type, getattr(samples, "_parts", ()))}:
        monkeypatch.setattr(place, "targets", None)
    assert samples.total_targets(indices) == expected
    assert samples.total_targets(indices[:0]) == 0
    assert samples.total_rows(indices) == sum(samples[n].documents for n in indices.tolist())
    assert samples.total_rows(indices[:0]) == 0
    for wrong in (-1, len(samples)):
        with pytest.raises(IndexError, match=f"of {len(samples)}"):
            samples.total_targets(np.append(indices, wrong))
