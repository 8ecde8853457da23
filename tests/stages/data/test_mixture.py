from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contracts.data import Sample, Samples
from pipeline.contracts.stage import Context
from pipeline.errors import StageError
from stages.data.chat import ChatData
from stages.data.samples import mixed
from stages.data.sources import Source
from stages.data.text import TextData
from tests.stages.data.fakes import FakeSource, ids
from tests.support.hub import HubCache, hub_cache

__all__ = ["hub_cache"]


class Numbers(Samples):
    """`count` samples, each with its own number as its only token, from `first` on."""

    def __init__(self, first: int, count: int) -> None:
        self._numbers = np.arange(first, first + count)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = self._numbers[index : index + 1]
        return Sample(input_ids=number, labels=number)

    def targets(self, index: int) -> int:
        return int(self._numbers[index])


def content(samples: Samples) -> list[int]:
    return [int(samples[index].input_ids[0]) for index in range(len(samples))]


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


def rows(path: Path, letters: str) -> str:
    path.write_text("".join(json.dumps({"text": f"{letter}."}) + "\n" for letter in letters))
    return str(path)


def letters(samples: Samples) -> str:
    """Return the first token of each sample as a letter."""
    return "".join(chr(33 + int(samples[index].input_ids[0])) for index in range(len(samples)))


def test_chat_sources(
    ctx: Context, source: FakeSource, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first, second = rows(tmp_path / "a.jsonl", "abcd"), rows(tmp_path / "b.jsonl", "xyz")
    stage = ChatData(
        sources=(Source(files=first), Source(files=second, weight=2)),
        heldout_fraction=0.25,
        cache=str(tmp_path / "cache"),
    )
    data = stage.run(ctx, source)
    assert letters(data.train) == "abcxxxyyy"
    assert data.heldout is not None
    assert letters(data.heldout) == "dz"
    assert "a.jsonl: 4 rows (text), 12 tokens, 8 trained on" in caplog.text
    assert "b.jsonl: 3 rows (text), 9 tokens, 6 trained on" in caplog.text
    held = dataclasses.replace(
        stage, sources=(Source(files=first),), heldout_sources=(Source(files=second),),
        heldout_fraction=0.0,
    ).run(ctx, source)  # fmt: skip
    assert letters(held.train) == "abcd"
    assert letters(held.heldout or Numbers(0, 0)) == "xyz"


def test_each_source_has_its_own_tokens_in_the_cache(
    ctx: Context, source: FakeSource, tmp_path: Path
) -> None:
    first, second = rows(tmp_path / "a.jsonl", "abcd"), rows(tmp_path / "b.jsonl", "xyz")
    stage = ChatData(files=first, cache=str(tmp_path / "cache"))
    prints = [stage.run(ctx, source).fingerprint]
    for weight in (1.0, 2.0):
        both = (Source(files=first), Source(files=second, weight=weight))
        prints.append(
            dataclasses.replace(stage, files=(), sources=both).run(ctx, source).fingerprint
        )
    assert len(set(prints)) == 3
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_text_sources(ctx: Context, source: FakeSource, tmp_path: Path) -> None:
    for name, text in (("a", "abcdefgh"), ("b", "xy")):
        (tmp_path / f"{name}.txt").write_text(text)
    stage = TextData(
        sources=tuple(Source(files=str(tmp_path / f"{name}.txt")) for name in "ab"),
        append_eos=False,
        sequence_length=2,
        cache=str(tmp_path / "cache"),
    )
    data = stage.run(ctx, source)
    labels = [[int(token) for token in data.train[i].labels] for i in range(len(data.train))]
    assert labels == [ids("bc"), ids("de"), ids("fg"), ids("h"), *[ids("y")] * 4]


class TestHub:
    """A real `datasets.Dataset` from a `load_dataset` that accepts the right arguments only."""

    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        import datasets

        asked: list[Any] = []

        def load(repo: str, config: str | None, *, split: str, revision: str) -> Any:
            asked.append((repo, config, split, revision))
            if split != "train":
                raise ValueError(f"Unknown split \"{split}\". Should be one of ['train'].")
            values = [{"text": f"{letter}.", "other": None} for letter in "abc"]
            return datasets.Dataset.from_list(values)

        monkeypatch.setattr(datasets, "load_dataset", load)
        return asked

    def test_rows(self, ctx: Context, source: FakeSource, tmp_path: Path, asked: list[Any]) -> None:
        part = Source(dataset="owner/name", config="en", revision=self.COMMIT)
        stage = ChatData(sources=(part,), cache=str(tmp_path / "cache"))
        assert letters(stage.run(ctx, source).train) == "abc"
        assert asked == [("owner/name", "en", "train", self.COMMIT)]
        text = TextData(sources=(part,), sequence_length=3, cache=str(tmp_path / "cache"))
        blocks = text.run(ctx, source).train
        assert [blocks[i].input_ids[0] for i in range(len(blocks))] == ids("abc")

    def test_a_tag_is_resolved(
        self,
        ctx: Context,
        source: FakeSource,
        tmp_path: Path,
        asked: list[Any],
        hub_cache: HubCache,
    ) -> None:
        hub_cache.refer("dataset", "owner/name", v1="1" * 40, main="2" * 40)
        parts = [Source(dataset="owner/name", revision=each) for each in ("v1", None, "1" * 40)]
        stages = [ChatData(sources=(part,), cache=str(tmp_path / "cache")) for part in parts]
        prints = [stage.run(ctx, source).fingerprint for stage in stages]
        assert [revision for *_, revision in asked] == ["1" * 40, "2" * 40, "1" * 40]
        assert prints[0] == prints[2] != prints[1]

    def test_an_unknown_split(
        self, ctx: Context, source: FakeSource, tmp_path: Path, asked: list[Any]
    ) -> None:
        part = Source(dataset="owner/name", split="trian", revision=self.COMMIT)
        with pytest.raises(StageError) as caught:
            ChatData(sources=(part,), cache=str(tmp_path / "cache")).run(ctx, source)
        assert str(caught.value) == (
            'cannot get owner/name/trian from the hub: Unknown split "trian". '
            "Should be one of ['train']."
        )

    def test_a_missing_column(
        self, ctx: Context, source: FakeSource, tmp_path: Path, asked: list[Any]
    ) -> None:
        part = Source(dataset="owner/name", revision=self.COMMIT)
        stage = TextData(sources=(part,), text_key="body", cache=str(tmp_path / "cache"))
        with pytest.raises(StageError, match=r"no column 'body'; it has \['text', 'other'\]"):
            stage.run(ctx, source)
