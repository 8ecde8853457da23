"""`data.stream`: order of the samples, files read for them, and memory kept."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from pipeline.contracts.data import Data
from pipeline.contracts.engine import DataAxis
from pipeline.contracts.metrics import records
from pipeline.contracts.sample_order import SampleOrder
from pipeline.contracts.stage import Context
from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError
from pipeline.testing import plan_view
from stages.batches.feed import Feed
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.data import shards
from stages.data.shards import StreamOrder, located
from stages.data.stages import StreamData, TextData
from stages.optimizer.adamw import AdamW
from stages.train.causal_lm import TrainCausalLm
from tests.stages.data.fakes import SPECIAL, FakeSource, ids
from tests.support.processes import run_ranks
from tests.support.runs import context, spied
from tests.support.state import Setting, make_engine, source

LENGTH, WINDOW, SEED = 4, 3, 11
END = SPECIAL["<|end|>"]


def documents(shard: int) -> list[str]:
    """Return a shard's documents, whose number differs between shards."""
    return [f"{shard}.{row}" * (1 + shard % 3) for row in range(2 + shard % 4)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write eight shards of different lengths."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for shard in range(8):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in documents(shard))
        (folder / f"{shard}.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    return folder


def stream(folder: Path, **fields: Any) -> StreamData:
    return StreamData(
        **{
            "shards": f"{folder}/*.jsonl.gz", "sequence_length": LENGTH, "window": WINDOW,
            "cache": str(folder.parent / "cache"), **fields,
        }
    )  # fmt: skip


def opened(stage: StreamData, ctx: Context) -> tuple[Data, Any]:
    """Return the data, and the call for the end of the run."""
    closes: list[Any] = []
    data = stage.run(dataclasses.replace(ctx, on_exit=closes.append), FakeSource())
    (close,) = closes
    return data, close


def taken(data: Data, start: int, count: int, *, shuffle: bool = True) -> list[list[int]]:
    """Return the ids of the samples at some positions of the order, with the last label."""
    order = data.train.order(SEED, shuffle=shuffle)
    samples = [data.train[int(index)] for index in order.indices(start, count)]
    return [[*sample.input_ids.tolist(), int(sample.labels[-1])] for sample in samples]


def expected_blocks(shard: int) -> list[list[int]]:
    tokens = [token for text in documents(shard) for token in [*ids(text), END]]
    return [tokens[at : at + LENGTH + 1] for at in range(0, len(tokens) - 1, LENGTH)]


def expected(windows: int) -> Iterator[list[int]]:
    """Return the expected samples, worked out with everything in memory."""
    for number in range(windows):
        epoch, place = divmod(number, 3)
        shards = SampleOrder(SEED, 8).indices(8 * epoch, 8)[WINDOW * place : WINDOW * (place + 1)]
        blocks = [block for shard in shards for block in expected_blocks(int(shard))]
        for index in SampleOrder(SEED, len(blocks)).indices(number * len(blocks), len(blocks)):
            yield blocks[int(index)]


def test_three_epochs_are_what_the_definition_says(ctx: Context, folder: Path) -> None:
    data, _ = opened(stream(folder), ctx)
    wanted = list(expected(9))
    assert taken(data, 0, len(wanted)) == wanted
    assert taken(data, 17, 40) == wanted[17:57]  # whatever was read before
    epoch = Counter(tuple(block) for shard in range(8) for block in expected_blocks(shard))
    size = len(wanted) // 3
    for number in range(3):
        part = wanted[number * size : (number + 1) * size]
        assert Counter(map(tuple, part)) == epoch
    assert wanted[:size] != wanted[size : 2 * size]


def test_without_shuffle_it_is_the_files_in_order(ctx: Context, folder: Path) -> None:
    data, _ = opened(stream(folder), ctx)
    blocks = [block for shard in range(8) for block in expected_blocks(shard)]
    assert taken(data, 0, len(blocks) + 1, shuffle=False) == [*blocks, blocks[0]]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """Return the names of the shards of `folder` that are read; a thread of an earlier test may
    still read."""
    return built_of(folder, monkeypatch)


def built_of(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    def name(store: Any, shard: Any, entry: Path) -> str | None:
        path = Path(shard.address)
        return path.name if path.parent == folder else None

    return spied(patch, shards.ShardStore, "_build", name)


def test_a_resumed_run_reads_its_window_alone(ctx: Context, folder: Path, built: list[str]) -> None:
    stage = stream(folder, ahead=0)
    data, close = opened(stage, ctx)
    wanted = list(expected(5))
    first = len(list(expected(4)))
    assert taken(data, 0, first + 2) == wanted[: first + 2]
    close()
    assert not list((folder.parent / "cache").iterdir())  # no tokens are left
    built.clear()
    resumed, _ = opened(stage, ctx)
    assert taken(resumed, first + 2, len(wanted) - first - 2) == wanted[first + 2 :]
    window = SampleOrder(SEED, 8).indices(8, 8)[WINDOW : 2 * WINDOW]
    assert sorted(built) == sorted(f"{shard}.jsonl.gz" for shard in window)


def test_without_what_was_noted_it_comes_to_the_same(ctx: Context, folder: Path) -> None:
    data, close = opened(stream(folder), ctx)
    taken(data, 0, 60)
    close()
    (ctx.run_dir / "stream.jsonl").unlink()
    again, _ = opened(stream(folder), ctx)
    assert taken(again, 50, 20) == list(expected(9))[50:70]


def test_what_is_kept_is_bounded(ctx: Context, folder: Path, built: list[str]) -> None:
    data, close = opened(stream(folder, window=2, ahead=1), ctx)
    most = 0
    order = data.train.order(SEED, shuffle=True)
    for position in range(120):
        (index,) = order.indices(position, 1)
        assert data.train.targets(int(index)) == len(data.train[int(index)].labels)
        entries = [path for path in (folder.parent / "cache").glob("stream-*/*") if path.is_dir()]
        most = max(most, len([path for path in entries if not path.name.endswith(".partial")]))
    close()
    # three windows of two, and the one that the thread has just made
    assert 4 <= most <= 7
    assert len(built) > 8  # so the removed one was read again


def test_windows_are_prepared_ahead(ctx: Context, folder: Path, built: list[str]) -> None:
    data, close = opened(stream(folder, ahead=1), ctx)
    taken(data, 0, 1)
    close.__self__._ahead.shutdown()
    second = SampleOrder(SEED, 8).indices(0, 8)[WINDOW : 2 * WINDOW]
    assert built[WINDOW:] == [f"{shard}.jsonl.gz" for shard in second]


def test_documents_apart(ctx: Context, folder: Path) -> None:
    data, _ = opened(stream(folder, documents_apart=True), ctx)
    assert data.packed
    order = data.train.order(SEED, shuffle=True)
    indices = order.indices(0, 30)
    assert data.train.total_targets(indices) == sum(map(data.train.targets, indices.tolist()))
    documents = [data.train[index].documents for index in indices.tolist()]
    assert data.train.total_rows(indices) == sum(documents)
    for index in indices.tolist():
        sample = data.train[index]
        assert sample.positions is not None
        assert data.train.targets(index) == int((sample.labels >= 0).sum())


def train(dist: DistContext, run: str, corpus: str) -> list[float]:
    """Train two steps of a tiny model on a stream, its loss in chunks; return the losses."""
    ctx = context(dist, run)
    setting = Setting(wrap="ddp", model={"vocab_size": 259})
    plan = AdamW().run(ctx)
    engine = make_engine(ctx, setting, plan)
    checkpoints = ShardedCheckpoint().run(ctx, engine)
    data, close = opened(stream(Path(corpus), documents_apart=True), ctx)
    loop = TrainCausalLm(global_batch_size=2, steps=2, log_every=1, loss_chunk_size=3)
    loop.run(ctx, engine, data, plan, checkpoints, source(ctx, setting))
    for each in (checkpoints.close, engine.close, close):
        each()
    return [line["loss"] for line in records(ctx.run_dir / "metrics.jsonl") if "loss" in line]


def test_a_stream_is_trained_on(folder: Path, tmp_path: Path) -> None:
    losses = run_ranks(train, 1, str(tmp_path / "run"), str(folder))[0]
    assert losses == pytest.approx([math.log(259)] * 2, rel=0.1)


def test_the_feed_of_any_number_of_ranks(ctx: Context, folder: Path) -> None:
    """With the training loop's own feed, the shares of two ranks are the batches of one."""
    data, _ = opened(stream(folder), ctx)
    config = TrainCausalLm(steps=12, global_batch_size=6, micro_batch_size=2)
    cpu = torch.device("cpu")

    def batches(rank: int, ranks: int) -> list[list[list[int]]]:
        feed = Feed(config, data, SEED, DataAxis(index=rank, count=ranks), cpu)
        found = []
        for step in range(config.steps or 0):
            rows = [batch.labels for batch, *_ in feed.microbatches(6 * step)]
            found.append([row.tolist() for labels in rows for row in labels])
        return found

    def unpadded(rows: list[list[int]]) -> list[list[int]]:
        return [[label for label in row if label >= 0] for row in rows]

    one = batches(0, 1)
    two = [[*first, *second] for first, second in zip(batches(0, 2), batches(1, 2), strict=True)]
    wanted = [block[1:] for block in list(expected(9))[:72]]
    assert [row for step in one for row in unpadded(step)] == wanted
    assert [row for step in two for row in unpadded(step)] == wanted


def rank_of_two(dist: Any, folder: str, run_dir: str) -> Any:
    names = built_of(Path(folder), pytest.MonkeyPatch())
    data, _ = opened(stream(Path(folder), ahead=2), context(dist, run_dir))
    found = taken(data, 0, 60)
    dist.barrier()
    return {"found": found, "built": names, "fingerprint": data.fingerprint}


def test_processes_of_a_node_share_the_work(folder: Path, tmp_path: Path) -> None:
    first, second = run_ranks(rank_of_two, 2, str(folder), str(tmp_path / "run"))
    wanted = list(expected(9))[:60]
    assert first["found"] == wanted
    assert second["found"] == wanted
    assert first["fingerprint"] == second["fingerprint"]
    counts = Counter(first["built"] + second["built"])
    assert set(counts) == {f"{shard}.jsonl.gz" for shard in range(8)}
    assert max(counts.values()) == 1


def test_an_object_store(ctx: Context, folder: Path) -> None:
    memory = fsspec.filesystem("memory")
    for path in folder.iterdir():
        memory.pipe_file(f"/corpus/{path.name}", path.read_bytes())
    stage = stream(folder, shards="memory://corpus/*.jsonl.gz")
    data, close = opened(stage, ctx)
    assert taken(data, 0, 70) == list(expected(9))[:70]
    assert not list((folder.parent / "cache").glob("stream-*/shard-*"))
    memory.pipe_file("/corpus/9.jsonl.gz", gzip.compress(b'{"text": "x"}\n{"body": 3}\n'))
    close()
    bad, _ = opened(dataclasses.replace(stage, shards="memory://corpus/9.jsonl.gz"), ctx)
    with pytest.raises(StageError, match=r"^memory:/+corpus/9\.jsonl\.gz:2: no key 'text'"):
        taken(bad, 0, 1)
    memory.pipe_file("/corpus/_SUCCESS", b"")
    with pytest.raises(
        StageError, match=r"corpus/_SUCCESS: unknown kind of file \(convert it to one of: \.txt"
    ):
        opened(dataclasses.replace(stage, shards="memory://corpus/*"), ctx)
    memory.rm("/corpus", recursive=True)
    with pytest.raises(StageError, match="no such file: memory://corpus/"):
        opened(stage, ctx)
    with pytest.raises(StageError, match=r"nowhere://x\.txt cannot be opened"):
        opened(dataclasses.replace(stage, shards="nowhere://x.txt"), ctx)


def test_heldout_files(ctx: Context, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("abcdef")
    stage = stream(folder, heldout_files=str(tmp_path / "held.txt"))
    data, _ = opened(stage, ctx)
    reference = TextData(
        files=str(tmp_path / "held.txt"), sequence_length=LENGTH, cache=str(tmp_path / "cache")
    ).run(ctx, FakeSource())
    assert data.heldout is not None
    assert len(data.heldout) == len(reference.train) == 2
    assert data.heldout[0].labels.tolist() == reference.train[0].labels.tolist()


def test_a_shard_that_has_changed(ctx: Context, folder: Path) -> None:
    data, close = opened(stream(folder), ctx)
    taken(data, 0, 70)
    close()
    changed = folder / "3.jsonl.gz"
    size = changed.stat().st_size
    row = b'{"text": "other"}\n'
    changed.write_bytes(gzip.compress(row).ljust(size, b"\0"))
    again, _ = opened(stream(folder), ctx)
    with pytest.raises(StageError, match=r"3\.jsonl\.gz is not the file that this run has read"):
        taken(again, 0, 70)


def test_a_shard_that_an_earlier_version_read(ctx: Context, folder: Path) -> None:
    """It gave a text that ends with the end token another one."""
    (folder / "3.jsonl.gz").write_bytes(gzip.compress(b'{"text": "ab<|end|>"}\n'))
    data, close = opened(stream(folder), ctx)
    wanted = taken(data, 0, 70)
    close()
    index = ctx.run_dir / "stream.jsonl"
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    for line in lines:
        line["tokens"] += line["address"].endswith("/3.jsonl.gz")
    index.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again, close = opened(stream(folder), ctx)
    with pytest.raises(StageError) as caught:
        taken(again, 0, 70)
    assert str(caught.value).startswith(
        f"{folder}/3.jsonl.gz has 3 tokens now, and had 4 when this run read it first: earlier "
    )
    close()
    index.unlink()
    assert taken(opened(stream(folder), ctx)[0], 0, 70) == wanted


def test_the_first_step_reads_no_more_than_its_window(
    ctx: Context, folder: Path, built: list[str]
) -> None:
    data, _ = opened(stream(folder, ahead=0), ctx)
    config = TrainCausalLm(steps=9, global_batch_size=2, micro_batch_size=2, workers=0)
    feed = Feed(config, data, SEED, DataAxis(index=0, count=1), torch.device("cpu"))
    list(feed.microbatches(0))
    assert len(built) == WINDOW


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_shard_that_cannot_be_read(ctx: Context, folder: Path, *, is_folder: bool) -> None:
    data, _ = opened(stream(folder), ctx)
    for path in folder.iterdir():
        path.unlink()
        if is_folder:
            path.mkdir()
    words = "Is a directory" if is_folder else "No such file or directory"
    first = SampleOrder(SEED, 8).indices(0, 1)[0]
    with pytest.raises(StageError) as caught:
        taken(data, 0, 1)
    assert str(caught.value) == f"{folder}/{first}.jsonl.gz: cannot be read: {words}"


def test_a_cache_that_cannot_be_written(ctx: Context, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = r"^cannot write the cache in .*stream-.* \(set `cache` to another folder\)"
    with pytest.raises(StageError, match=refused):
        opened(stream(folder, cache=str(tmp_path / "file" / "cache")), ctx)
    data, _ = opened(stream(folder), ctx)
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(StageError, match=refused):
        taken(data, 0, 1)


def test_identity(ctx: Context, folder: Path) -> None:
    prints = {
        opened(stream(folder, **fields), ctx)[0].fingerprint
        for fields in ({}, {"window": 2}, {"sequence_length": 5}, {"shards": f"{folder}/[0-6]*"})
    }
    assert len(prints) == 4
    prints.add(opened(stream(folder, ahead=3), ctx)[0].fingerprint)
    assert len(prints) == 4


@pytest.mark.parametrize("content", [b"", b"\n", b'{"text": " "}\n'])
def test_a_blank_shard_is_told_and_left_out(
    ctx: Context, folder: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "5.jsonl.gz").write_bytes(gzip.compress(content))
    data, _ = opened(stream(folder, documents_apart=True, ahead=0), ctx)
    blocks = [block for shard in range(8) if shard != 5 for block in expected_blocks(shard)]
    order = data.train.order(SEED, shuffle=False).indices(0, len(blocks) + 1).tolist()
    found = [data.train[index].input_ids.tolist() for index in order]
    assert found == [block[:-1] for block in [*blocks, blocks[0]]]
    shuffled = taken(data, 0, 2 * len(blocks))
    epochs = shuffled[: len(blocks)], shuffled[len(blocks) :]
    assert sorted(epochs[0]) == sorted(epochs[1])
    warned = {each.getMessage() for each in caplog.records if each.levelname == "WARNING"}
    assert warned == {f"stream: {folder}/5.jsonl.gz has no text"}


def test_shards_without_text(ctx: Context, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("x")
    stage = StreamData(
        shards=f"{tmp_path}/*.txt", append_eos=False, cache=str(tmp_path / "cache"), ahead=0
    )
    data, _ = opened(stage, ctx)
    with pytest.raises(StageError, match="no shard has two tokens of text"):
        taken(data, 0, 1)


def test_epochs_need_a_length(folder: Path, ctx: Context) -> None:
    stage = stream(folder)
    slots = {"data": stage, "train": TrainCausalLm(epochs=1, global_batch_size=2)}
    (problem,) = stage.check(plan_view(slots))
    assert str(problem) == (
        "shards: does not know how many samples an epoch has (give the train slot `steps` instead "
        "of `epochs`)"
    )
    slots["train"] = TrainCausalLm(steps=1, global_batch_size=2)
    assert not list(stage.check(plan_view(slots)))
    with pytest.raises(StageError, match="the number of samples of a stream is not known"):
        len(opened(stage, ctx)[0].train)


def test_mistakes_that_show_before_the_run(folder: Path) -> None:
    def found(**fields: Any) -> list[tuple[str, str]]:
        stage = stream(folder, **fields)
        return [(each.key, each.message) for each in stage.check(plan_view({"data": stage}))]

    assert found(shards=()) == [("shards", "no file is named")]
    assert found(shards="s3://bucket/*.txt") == []
    assert found(shards=f"{folder}/9*") == [("shards", f"no such file: {folder}/9*")]
    held = f"{folder}/1.jsonl.gz"
    assert found(heldout_files=held) == [("heldout_files", f"{held} is also trained on")]


def test_an_index_says_where_it_is() -> None:
    order = StreamOrder(1, shuffle=False, shards=3, window=2, count=lambda shard: shard + 1)
    assert [located(int(index)) for index in order.indices(0, 8)] == [
        (0, 0, 0), (0, 1, 0), (0, 1, 1), (1, 2, 0), (1, 2, 1), (1, 2, 2), (2, 0, 0), (2, 1, 0)
    ]  # fmt: skip
    with pytest.raises(StageError, match="1048577 shards are more than the 1048576"):
        StreamOrder(1, shuffle=False, shards=(1 << 20) + 1, window=2, count=lambda shard: 1)
    large = StreamOrder(1, shuffle=True, shards=1, window=1, count=lambda shard: 1 << 21)
    with pytest.raises(StageError, match="2097152 blocks in a shard are more than the 1048576"):
        large.indices(0, 1)
