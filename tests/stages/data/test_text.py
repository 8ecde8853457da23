from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.contracts.data import Data, Samples
from pipeline.contracts.stage import Context
from pipeline.errors import DataError, StageError
from stages.data import documents
from stages.data import tokenizer_compat as pieces
from stages.data.text import TextData
from tests.stages.data.fakes import SPECIAL, FakeSource, ids
from tests.support.tier import times

END = SPECIAL["<|end|>"]


@pytest.fixture
def text(tmp_path: Path) -> Any:
    """Return a call that makes a TextData stage with its own cache."""

    def make(files: Any, **fields: Any) -> TextData:
        fields = {"sequence_length": 4, "cache": str(tmp_path / "cache"), **fields}
        return TextData(files=files if isinstance(files, tuple) else str(files), **fields)

    return make


def write(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


def labels(samples: Samples) -> list[int]:
    return [int(label) for index in range(len(samples)) for label in samples[index].labels]


def test_blocks_of_two_documents(
    ctx: Context, source: FakeSource, text: Any, tmp_path: Path
) -> None:
    files = (str(write(tmp_path / "b.txt", "ab")), str(write(tmp_path / "a.txt", "cde")))
    data: Data = text(files).run(ctx, source)
    a, b, c, d, e = 64, 65, 66, 67, 68
    assert ids("abcde") == [a, b, c, d, e]
    assert len(data.train) == 2
    assert data.train[0].input_ids.tolist() == [a, b, END, c]
    assert data.train[0].labels.tolist() == [b, END, c, d]
    assert data.train[1].input_ids.tolist() == [d, e]
    assert data.train[1].labels.tolist() == [e, END]
    assert [data.train.targets(0), data.train.targets(1)] == [4, 2]
    assert data.train[0].labels.dtype == np.int64
    assert data.heldout is None
    assert data.pad_id == END
    with pytest.raises(IndexError):
        data.train[2]


@settings(
    max_examples=times(quick=25, full=250),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    documents=st.lists(st.text("ab c\n", min_size=1).filter(str.strip), min_size=1, max_size=6),
    length=st.integers(1, 9),
    fraction=st.sampled_from([0.0, 0.25, 0.5]),
)
def test_every_token_is_a_target_once(
    ctx: Context,
    source: FakeSource,
    tmp_path: Path,
    documents: list[str],
    length: int,
    fraction: float,
) -> None:
    rows = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    stage = TextData(
        files=str(write(tmp_path / "d.jsonl", rows)),
        sequence_length=length,
        heldout_fraction=fraction,
        cache=str(tmp_path / "cache"),
    )
    stream = [token for document in documents for token in [*ids(document), END]]
    if fraction and len(stream) - 1 <= length:
        with pytest.raises(StageError, match="leaves none to train on"):
            stage.run(ctx, source)
        return
    data = stage.run(ctx, source)
    held = labels(data.heldout) if data.heldout else []
    assert labels(data.train) + held == stream[1:]
    assert bool(held) == bool(fraction)
    targets = sum(data.train.targets(index) for index in range(len(data.train)))
    assert targets == len(labels(data.train))


def test_forms_of_files_give_the_same_tokens(
    ctx: Context, source: FakeSource, text: Any, tmp_path: Path
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    documents = ["one", "two words", "3"]
    rows = "".join(json.dumps({"body": document}) + "\n" for document in documents)
    write(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(rows.encode()))
    write(tmp_path / "a.txt", "\ufeff" + "\r\n\r\n".join(documents))
    table = pyarrow.table({"body": documents, "other": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    expected = [token for document in documents for token in [*ids(document), END]]
    for name in ("a.jsonl", "a.json.gz", "a.txt", "a.parquet"):
        data = text(tmp_path / name, text_key="body", documents="line").run(ctx, source)
        assert labels(data.train) == expected[1:], name


def test_a_glob_is_sorted(ctx: Context, source: FakeSource, text: Any, tmp_path: Path) -> None:
    write(tmp_path / "2.txt", "b")
    write(tmp_path / "1.txt", "a")
    stage = text((str(tmp_path / "*.txt"),), prepend_bos=False)
    assert labels(stage.run(ctx, source).train) == [END, *ids("b"), END]


def test_start_and_end_tokens(ctx: Context, source: FakeSource, text: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "ab")
    assert labels(text(path, append_eos=False).run(ctx, source).train) == ids("b")
    with pytest.raises(StageError, match="no bos_token"):
        text(path, prepend_bos=True).run(ctx, source)
    source.fast.bos_token = "<|s|>"
    data = text(path, prepend_bos=True).run(ctx, source)
    assert data.train[0].input_ids.tolist() == [SPECIAL["<|s|>"], *ids("ab")]
    with pytest.raises(StageError, match=r"no eos_token.*append_eos: false"):
        text(path).run(ctx, FakeSource(eos=None))


def test_documents_begin_as_the_tokenizer_s_own_call_does(
    ctx: Context, text: Any, tmp_path: Path
) -> None:
    stage, source = text(write(tmp_path / "a.txt", "ab")), FakeSource(bos="<|s|>")
    data = stage.run(ctx, source)
    assert data.train[0].input_ids.tolist() == [SPECIAL["<|s|>"], *ids("ab")]
    without = dataclasses.replace(stage, prepend_bos=False).run(ctx, source)
    assert without.train[0].input_ids.tolist() == ids("ab")
    assert (data.identity["prepend_bos"], without.identity["prepend_bos"]) == (True, False)


def test_heldout_files(ctx: Context, source: FakeSource, text: Any, tmp_path: Path) -> None:
    train, held = write(tmp_path / "a.txt", "aaa"), write(tmp_path / "b.txt", "bb")
    data = text(train, heldout_files=str(held)).run(ctx, source)
    assert labels(data.train) == [*ids("aa"), END]
    assert labels(data.heldout) == [*ids("b"), END]


def test_fingerprint_follows_content_and_settings_but_not_names(
    ctx: Context, source: FakeSource, text: Any, tmp_path: Path
) -> None:
    stage = text(write(tmp_path / "a.txt", "some text"))
    same = text(write(tmp_path / "copy.txt", "some text"))
    first = stage.run(ctx, source).fingerprint
    assert same.run(ctx, source).fingerprint == first
    marked = FakeSource()
    marked.fast.add_tokens(["some"])
    others = [
        dataclasses.replace(stage, sequence_length=3).run(ctx, source).fingerprint,
        dataclasses.replace(stage, append_eos=False).run(ctx, source).fingerprint,
        dataclasses.replace(stage, heldout_fraction=0.5).run(ctx, source).fingerprint,
        text(write(tmp_path / "a.txt", "some texts")).run(ctx, source).fingerprint,
    ]
    marked.rows = 300
    others.append(same.run(ctx, marked).fingerprint)
    assert len({first, *others}) == 6


def test_long_documents_do_not_warn(
    ctx: Context, source: FakeSource, text: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert source.fast.model_max_length == 8
    text(write(tmp_path / "a.txt", "x" * 100)).run(ctx, source)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_tokenizer_of_another_model_is_refused(
    ctx: Context, source: FakeSource, text: Any, tmp_path: Path
) -> None:
    source.rows = 100
    with pytest.raises(StageError, match=r"made id 256, but fake embeds 100 .*`vocab_size: "):
        text(write(tmp_path / "a.txt", "ab")).run(ctx, source)


def test_one_token_is_too_little(
    ctx: Context, source: FakeSource, text: Any, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="fewer than two tokens"):
        text(write(tmp_path / "a.txt", "x"), append_eos=False).run(ctx, source)


@pytest.mark.parametrize("batch", [1, 2, 256])
def test_texts_with_a_begin_or_end_of_their_own_are_counted_once(
    ctx: Context,
    text: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    batch: int,
) -> None:
    """The long one is tokenised in pieces."""
    monkeypatch.setattr(pieces, "PIECE", 4)
    monkeypatch.setattr(documents, "_BATCH", batch)
    both = "<|s|>a b c d e f g h<|end|>"
    rows = ["x y z w", both, "a b c d e<|end|>", "u v w x y z", "<|s|>b"]
    plain = write(tmp_path / "a.txt", "plain")
    other = write(tmp_path / "b.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in rows))
    text((str(plain), str(other))).run(ctx, FakeSource(bos="<|s|>"))
    assert "3 documents with their own begin or end token, which got no second one" in (caplog.text)
    assert f"the first: {other}:2" in caplog.text
    caplog.clear()
    whole = write(tmp_path / "c.txt", both)
    text((str(plain), str(whole))).run(ctx, FakeSource(bos="<|s|>"))
    assert "1 document with their own begin or end token" in caplog.text
    assert f", the first: {whole}\n" in caplog.text
