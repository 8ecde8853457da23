"""Documents as one stream of tokens, cut into blocks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from pipeline import Context, Samples, StageError
from stages.data import documents, tokenizer_compat
from stages.data.samples import STARTS, TOKENS
from stages.data.stages import TextData
from tests.stages.data.conftest import Chats
from tests.stages.data.fakes import SPECIAL, FakeSource, ids
from tests.support.tier import times

END, START = SPECIAL["<|end|>"], SPECIAL["<|s|>"]
NOVEL = Path(__file__).parents[3] / "recipes" / "data" / "persuasion.txt"


def write(path: Path, content: str) -> str:
    path.write_text(content, encoding="utf-8")
    return str(path)


def labels(samples: Samples | None) -> list[int]:
    assert samples is not None
    return [int(label) for index in range(len(samples)) for label in samples[index].labels]


def test_blocks_of_two_documents(chats: Chats, tmp_path: Path) -> None:
    files = (write(tmp_path / "b.txt", "ab"), write(tmp_path / "a.txt", "cde"))
    data = chats.text(files=files, sequence_length=4)
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
    globbed = chats.text(files=f"{tmp_path}/*.txt", prepend_bos=False)  # sorted
    assert labels(globbed.train) == [*ids("de"), END, *ids("ab"), END]
    held = chats.text(files=files[0], heldout_files=files[1])
    assert labels(held.train) == [*ids("b"), END]
    assert labels(held.heldout) == [*ids("de"), END]


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
    chats: Chats, documents: list[str], length: int, fraction: float
) -> None:
    fields: Any = {"sequence_length": length, "heldout_fraction": fraction}
    stream = [token for document in documents for token in [*ids(document), END]]
    if fraction and len(stream) - 1 <= length:
        with pytest.raises(StageError, match="leaves none to train on"):
            chats.text(*documents, **fields)
        return
    data = chats.text(*documents, **fields)
    held = labels(data.heldout) if data.heldout else []
    assert labels(data.train) + held == stream[1:]
    assert bool(held) == bool(fraction)
    targets = sum(data.train.targets(index) for index in range(len(data.train)))
    assert targets == len(labels(data.train))


def test_forms_of_files_give_the_same_tokens(chats: Chats, tmp_path: Path) -> None:
    documents = ["one", "two words", "3"]
    rows = "".join(json.dumps({"body": document}) + "\n" for document in documents)
    write(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(rows.encode()))
    write(tmp_path / "a.txt", "\ufeff" + "\r\n\r\n".join(documents))
    table = pyarrow.table({"body": documents, "other": [1, 2, 3]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    expected = [token for document in documents for token in [*ids(document), END]]
    for name in ("a.jsonl", "a.json.gz", "a.txt", "a.parquet"):
        data = chats.text(files=str(tmp_path / name), text_key="body", documents="line")
        assert labels(data.train) == expected[1:], name


def test_start_and_end_tokens(chats: Chats, source: FakeSource) -> None:
    assert labels(chats.text("ab", append_eos=False).train) == ids("b")
    with pytest.raises(StageError, match="no bos_token"):
        chats.text("ab", prepend_bos=True)
    source.fast.bos_token = "<|s|>"
    data = chats.text("ab", prepend_bos=True, source=source)
    assert data.train[0].input_ids.tolist() == [START, *ids("ab")]
    with pytest.raises(StageError, match=r"no eos_token.*append_eos: false"):
        chats.text("ab", source=FakeSource(eos=None))
    # as the tokenizer's own call does
    own = FakeSource(bos="<|s|>")
    data = chats.text("ab", source=own)
    assert data.train[0].input_ids.tolist() == [START, *ids("ab")]
    without = chats.text("ab", source=own, prepend_bos=False)
    assert without.train[0].input_ids.tolist() == ids("ab")
    assert (data.identity["prepend_bos"], without.identity["prepend_bos"]) == (True, False)


def test_fingerprint_follows_content_and_settings_but_not_names(
    chats: Chats, tmp_path: Path
) -> None:
    text = "some text"
    first = chats.text(text, sequence_length=4).fingerprint
    (tmp_path / "d.jsonl").rename(tmp_path / "copy.jsonl")
    copy = str(tmp_path / "copy.jsonl")
    assert chats.text(files=copy, sequence_length=4).fingerprint == first
    marked = FakeSource()
    marked.fast.add_tokens(["some"])
    marked.rows = 300
    others = [
        chats.text(text, sequence_length=3).fingerprint,
        chats.text(text, sequence_length=4, append_eos=False).fingerprint,
        chats.text(text, sequence_length=4, heldout_fraction=0.5).fingerprint,
        chats.text("some texts", sequence_length=4).fingerprint,
        chats.text(text, sequence_length=4, source=marked).fingerprint,
    ]
    assert len({first, *others}) == 6


def test_long_documents_do_not_warn(
    chats: Chats, source: FakeSource, caplog: pytest.LogCaptureFixture
) -> None:
    assert source.fast.model_max_length == 8
    chats.text("x" * 100, source=source)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    source.rows = 100
    with pytest.raises(StageError, match=r"made id 256, but fake embeds 100 .*`vocab_size: "):
        chats.text("ab", source=source)


@pytest.mark.parametrize("batch", [1, 2, 256])
def test_texts_with_a_begin_or_end_of_their_own_are_counted_once(
    chats: Chats,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    batch: int,
) -> None:
    """The long one is tokenised in pieces."""
    monkeypatch.setattr(tokenizer_compat, "PIECE", 4)
    monkeypatch.setattr(documents, "_BATCH", batch)
    both = "<|s|>a b c d e f g h<|end|>"
    rows = ["x y z w", both, "a b c d e<|end|>", "u v w x y z", "<|s|>b"]
    plain = write(tmp_path / "a.txt", "plain")
    other = write(tmp_path / "b.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in rows))
    source = FakeSource(bos="<|s|>")
    chats.text(files=(plain, other), source=source)
    assert "3 documents with their own begin or end token, which got no second one" in caplog.text
    assert f"the first: {other}:2" in caplog.text
    caplog.clear()
    whole = write(tmp_path / "c.txt", both)
    chats.text(files=(plain, whole), source=source)
    assert "1 document with their own begin or end token" in caplog.text
    assert f", the first: {whole}\n" in caplog.text


@settings(
    max_examples=times(quick=15, full=150),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    texts=st.lists(st.text("ab .\n", min_size=1).filter(str.strip), min_size=1, max_size=6),
    end=st.booleans(),
    batch=st.integers(1, 5),
)
def test_documents_are_the_same_in_pieces(
    ctx: Context, tmp_path: Path, texts: list[str], end: bool, batch: int
) -> None:
    """Here the tokenizer leaves out spaces and line ends, so that documents may have no token."""
    letters = "ab.e"
    model = models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    source = FakeSource()
    source.fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="e")
    kept = [[letters.index(each) for each in text if each in letters] for text in texts]
    streams = [[*tokens, *([3] if end else [])] for tokens in kept]
    begins = np.cumsum([0, *map(len, streams)])[:-1]
    folder = tmp_path / "entry"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_compat, "PIECE", 1)
        patch.setattr(documents, "_BATCH", batch)
        work = documents.DocumentEntries(TextData(files="-", append_eos=end), None, 1, ctx, source)
        counts, _ = work.write(folder, [documents.Document(text, "-", 0) for text in texts])
    assert np.fromfile(folder / TOKENS, "<u2").tolist() == [each for s in streams for each in s]
    wanted = [int(b) for b, stream in zip(begins, streams, strict=True) if stream]
    assert np.fromfile(folder / STARTS, "<i8").tolist() == wanted
    assert counts["documents"] == len(texts)
    assert counts["tokens"] == sum(map(len, streams))


def test_one_long_document_is_tokenised_by_several_processes(
    chats: Chats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_LARGEST_CALL", 20_000)
    file = write(tmp_path / "novel.txt", NOVEL.read_text("utf-8")[:100_000])
    calls: list[int] = []
    forked = documents.tokenize.map_batches

    def counted(function: Any, batches: Any, workers: Any) -> Any:
        for batch, result in forked(function, batches, workers):
            calls.append(len(batch))
            yield batch, result

    monkeypatch.setattr("stages.data.tokenize.map_batches", counted)
    found = []
    for workers in (1, 3):
        cache = tmp_path / str(workers)
        chats.text(files=file, cache=str(cache), workers=workers)
        (entry,) = cache.iterdir()
        found.append({path.name: path.read_bytes() for path in entry.iterdir()})
    assert len(calls) >= 10
    assert found[0] == found[1]
    assert json.loads(found[0]["meta.json"])["counts"]["documents"] == 1
