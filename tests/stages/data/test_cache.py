from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.contracts.stage import Context
from pipeline.errors import StageError
from stages.data import cache
from stages.data.cache import VerifiedArray, write_sums
from stages.data.chat import ChatData
from stages.data.documents import DocumentEntries as Documents
from stages.data.text import TextData
from tests.stages.data.fakes import FakeSource, ids
from tests.support.processes import run_ranks
from tests.support.runs import context


@pytest.fixture
def stage(tmp_path: Path) -> TextData:
    (tmp_path / "a.txt").write_text("abcdef")
    return TextData(
        files=str(tmp_path / "a.txt"),
        append_eos=False,
        sequence_length=8,
        cache=str(tmp_path / "cache"),
    )


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the folder of every tokenisation."""
    folders: list[Path] = []
    write = Documents.write

    def counted(self: Documents, folder: Path, *more: Any) -> cache.Counts:
        folders.append(folder)
        return write(self, folder, *more)

    monkeypatch.setattr(Documents, "write", counted)
    return folders


def entry(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "cache").iterdir()
    return found


def test_a_second_run_does_not_tokenise(
    ctx: Context, source: FakeSource, stage: TextData, builds: list[Path], tmp_path: Path
) -> None:
    first = stage.run(ctx, source)
    source.fast(["xxxx"], truncation=True, max_length=3)  # changes the backend too
    second = stage.run(ctx, source)
    assert len(builds) == 1
    assert first.fingerprint == second.fingerprint
    assert second.train[0].labels.tolist() == ids("bcdef")
    assert sorted(path.name for path in entry(tmp_path).iterdir()) == [
        "meta.json", "starts.bin", "starts.bin.sums", "tokens.bin", "tokens.bin.sums"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "damage", ["truncate", "remove", "sums", "meta", "counts", "no meta", "format"]
)
def test_a_damaged_entry_is_built_again(
    ctx: Context,
    source: FakeSource,
    stage: TextData,
    builds: list[Path],
    tmp_path: Path,
    damage: str,
) -> None:
    stage.run(ctx, source)
    tokens, meta = entry(tmp_path) / "tokens.bin", entry(tmp_path) / "meta.json"
    match damage:
        case "truncate":
            os.truncate(tokens, 3)
        case "remove":
            tokens.unlink()
        case "sums":
            (entry(tmp_path) / "tokens.bin.sums").unlink()
        case "counts":
            meta.write_text(meta.read_text().replace('"tokens": 6', '"tokens": 5'))
        case "meta":
            meta.write_text("[")
        case "no meta":
            meta.unlink()
        case _:
            current = f'"format": {cache.FORMAT}'
            meta.write_text(meta.read_text().replace(current, '"format": 1'))
    assert stage.run(ctx, source).train[0].labels.tolist() == ids("bcdef")
    assert len(builds) == 2


def flip(file: Path, at: int) -> None:
    """Change one bit in the byte at `at`, and keep the size and times."""
    times = file.stat()
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


ROWS = [
    {"messages": [{"role": role, "content": "x" * (17 * row)} for role in ("user", "assistant")]}
    for row in range(1, 40)
]


@pytest.mark.parametrize("packing", [False, True])
def test_a_changed_bit_is_never_trained_on(
    ctx: Context, source: FakeSource, packing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.data.cache.BLOCK", 64)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    stage = ChatData(files=str(tmp_path / "a.jsonl"), cache=str(tmp_path / "c"), packing=packing)

    def read() -> list[list[int]]:
        train = stage.run(ctx, source).train
        return [
            [*train[i].input_ids, *train[i].labels, train.targets(i)] for i in range(len(train))
        ]

    expected = read()
    files = sorted((tmp_path / "c").rglob("*.bin"))
    assert len(files) == (7 if packing else 4)
    for file in files:
        for at in (0, file.stat().st_size // 2, file.stat().st_size - 1):
            flip(file, at)
            with pytest.raises(StageError, match=rf"{file} has changed.*remove {file.parent}"):
                read()
            flip(file, at)
    assert read() == expected


def test_blocks_are_compared_once_and_only_where_something_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.data.cache.BLOCK", 16)
    file = tmp_path / "a.bin"
    np.arange(21, dtype="<u2").tofile(file)
    write_sums(file)
    flip(file, 16 + 3)
    held = VerifiedArray(file, "<u2")
    assert (len(held), held[:8].tolist(), held[16:99].tolist()) == (
        21, list(range(8)), list(range(16, 21))
    )  # fmt: skip
    with pytest.raises(StageError, match="bytes 16 to 31 differ"):
        held[7:9]
    flip(file, 0)  # compared files are not read again
    assert held[1:8].tolist() == list(range(1, 8))


def test_a_crash_leaves_nothing_to_be_found(
    ctx: Context,
    source: FakeSource,
    stage: TextData,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def crash(partial: Path, final: Path) -> Path:
        assert (partial / "tokens.bin").stat().st_size == 12
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            stage.run(ctx, source)
    assert list((tmp_path / "cache").iterdir()) == []
    assert stage.run(ctx, source).train[0].labels.tolist() == ids("bcdef")


def test_what_a_killed_build_left_is_swept_after_a_day(
    ctx: Context, source: FakeSource, stage: TextData, tmp_path: Path
) -> None:
    old, fresh = tmp_path / "cache" / "old.partial", tmp_path / "cache" / "fresh.partial"
    for folder in (old, fresh):
        folder.mkdir(parents=True)
        (folder / "tokens.bin").write_bytes(b"x")
    for path in (old / "tokens.bin", old):
        os.utime(path, (0, time.time() - 25 * 3600))
    stage.run(ctx, source)
    assert not old.exists()
    assert fresh.exists()


@pytest.mark.parametrize("gone", ["the folder", "a file"])
def test_what_another_process_finishes_is_not_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    live = tmp_path / "live.partial"
    live.mkdir()
    (live / "data").write_text("x")
    listed = Path.iterdir

    def finished_meanwhile(self: Path) -> Any:
        found = list(listed(self))
        if self == live:
            (live / "data").unlink()
            if gone == "the folder":
                live.rmdir()
        return iter(found)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", finished_meanwhile)
        cache.prepare_locally(tmp_path, "key", lambda folder: _written(folder, "own"))
    assert (tmp_path / "key" / "data").read_text() == "own"
    assert live.exists() == (gone == "a file")


def test_another_run_that_was_faster_wins(tmp_path: Path) -> None:
    def slow(partial: Path) -> cache.Counts:
        cache.prepare_locally(tmp_path, "key", lambda folder: _written(folder, "first"))
        return _written(partial, "second")

    cache.prepare_locally(tmp_path, "key", slow)
    assert (tmp_path / "key" / "data").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def _written(folder: Path, content: str) -> cache.Counts:
    (folder / "data").write_text(content)
    return {}


def test_a_folder_that_cannot_be_written(ctx: Context, source: FakeSource, stage: TextData) -> None:
    with pytest.raises(StageError, match=r"cannot write the cache.*set `cache`"):
        dataclasses.replace(stage, cache="/proc/no").run(ctx, source)


def first_rank_of_a_machine(dist: Any, machines: str) -> list[Any]:
    """Return what the first rank of a machine with its own disk finds in each of two files, of
    which the second differs."""
    found = list[Any]()
    for name in ("same.txt", "other.txt"):
        machine = Path(machines) / str(dist.rank)
        cache = str(machine / name.removesuffix(".txt"))
        stage = TextData(files=str(machine / name), append_eos=False, cache=cache, workers=1)
        ctx = context(dataclasses.replace(dist, local_rank=0), machine)
        try:
            found.append(stage.run(ctx, FakeSource()).train[0].labels.tolist())
        except StageError as error:
            found.append(str(error))
            if not dist.is_main:
                dist.barrier()  # the other waits for the entry
                with contextlib.suppress(StageError):  # and compares it
                    dist.require_same("tokenised data", {})
    return found


def test_machines_without_a_common_disk(tmp_path: Path) -> None:
    for rank, content in enumerate(["abc", "xyz"]):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "same.txt").write_text("abc")
        (tmp_path / str(rank) / "other.txt").write_text(content)
    first, second = run_ranks(first_rank_of_a_machine, 2, str(tmp_path))
    assert first[0] == second[0] == ids("bc")
    assert [len(list((tmp_path / rank / "same").iterdir())) for rank in "01"] == [1, 1]
    assert "tokenised data" in first[1]
    words = f"the files of this machine ({socket.gethostname()}, rank 1) differ "
    assert second[1].startswith(words)
    assert second[1].endswith("(copy the same files to every machine, or share them)")
    assert not list((tmp_path / "1" / "other").iterdir())  # nothing is built


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "pipetrain"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.cache_folder() == tmp_path / "home/.cache/pipetrain"
