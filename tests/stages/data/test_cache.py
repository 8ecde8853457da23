from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import StageError
from pipeline.utils import cache_folder
from stages.data import cache
from stages.data.cache import VerifiedArray, write_sums
from stages.data.documents import DocumentEntries
from stages.data.stages import TextData
from tests.stages.data.conftest import Chats
from tests.stages.data.fakes import FakeSource, ids
from tests.support.damage import flip
from tests.support.processes import run_ranks
from tests.support.runs import context, spied


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the folder of every tokenisation."""
    return spied(monkeypatch, DocumentEntries, "write", lambda _, folder, *rest: folder)


def read(chats: Chats, **fields: Any) -> list[int]:
    data = chats.text("abcdef", append_eos=False, sequence_length=8, **fields)
    return list(data.train[0].labels.tolist())


def test_a_second_run_does_not_tokenise(
    chats: Chats, source: FakeSource, builds: list[Path], tmp_path: Path
) -> None:
    first = chats.text("abcdef", append_eos=False, source=source)
    source.fast(["xxxx"], truncation=True, max_length=3)  # changes the backend too
    second = chats.text("abcdef", append_eos=False, source=source)
    assert len(builds) == 1
    assert first.fingerprint == second.fingerprint
    assert second.train[0].labels.tolist() == ids("bcdef")
    (entry,) = (tmp_path / "cache").iterdir()
    assert sorted(path.name for path in entry.iterdir()) == [
        "meta.json", "starts.bin", "starts.bin.sums", "tokens.bin", "tokens.bin.sums"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("tokens.bin", lambda content: content[:3]),
        ("tokens.bin", None),
        ("tokens.bin.sums", None),
        ("meta.json", lambda content: content.replace(b'"tokens": 6', b'"tokens": 5')),
        ("meta.json", lambda content: b"["),
        ("meta.json", None),
        ("meta.json", lambda content: content.replace(b'"format": 8', b'"format": 1')),
    ],
)
def test_a_damaged_entry_is_built_again(
    chats: Chats, builds: list[Path], tmp_path: Path, name: str, damage: Any
) -> None:
    read(chats)
    (entry,) = (tmp_path / "cache").iterdir()
    content = (entry / name).read_bytes()
    (entry / name).unlink()
    if damage:
        assert damage(content) != content
        (entry / name).write_bytes(damage(content))
    assert read(chats) == ids("bcdef")
    assert len(builds) == 2


def flip_unseen(file: Path, at: int) -> None:
    """Flip one bit of the byte at `at`, and keep the times."""
    times = file.stat()
    flip(file, at)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("packing", [False, True])
def test_a_changed_bit_is_never_trained_on(
    chats: Chats, packing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.data.cache.BLOCK", 64)
    roles = ("user", "assistant")
    rows = [
        {"messages": [{"role": role, "content": "x" * (17 * row)} for role in roles]}
        for row in range(1, 40)
    ]

    def samples() -> list[list[int]]:
        train = chats.run(*rows, packing=packing).train
        return [
            [*train[i].input_ids, *train[i].labels, train.targets(i)] for i in range(len(train))
        ]

    expected = samples()
    files = sorted((tmp_path / "cache").rglob("*.bin"))
    assert len(files) == (7 if packing else 4)
    for file in files:
        for at in (0, file.stat().st_size // 2, file.stat().st_size - 1):
            flip_unseen(file, at)
            with pytest.raises(StageError, match=rf"{file} has changed.*remove {file.parent}"):
                samples()
            flip_unseen(file, at)
    assert samples() == expected


def test_blocks_are_compared_once_and_only_where_something_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.data.cache.BLOCK", 16)
    file = tmp_path / "a.bin"
    np.arange(21, dtype="<u2").tofile(file)
    write_sums(file)
    flip_unseen(file, 16 + 3)
    held = VerifiedArray(file, "<u2")
    assert (len(held), held[:8].tolist(), held[16:99].tolist()) == (
        21, list(range(8)), list(range(16, 21))
    )  # fmt: skip
    with pytest.raises(StageError, match="bytes 16 to 31 differ"):
        held[7:9]
    flip_unseen(file, 0)  # compared files are not read again
    assert held[1:8].tolist() == list(range(1, 8))


def test_a_crash_leaves_nothing_to_be_found(
    chats: Chats, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def crash(partial: Path, final: Path) -> Path:
        assert (partial / "tokens.bin").stat().st_size == 12
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            read(chats)
    assert list((tmp_path / "cache").iterdir()) == []
    assert read(chats) == ids("bcdef")


def test_what_a_killed_build_left_is_swept_after_a_day(chats: Chats, tmp_path: Path) -> None:
    old, fresh = tmp_path / "cache" / "old.partial", tmp_path / "cache" / "fresh.partial"
    for folder in (old, fresh):
        folder.mkdir(parents=True)
        (folder / "tokens.bin").write_bytes(b"x")
    for path in (old / "tokens.bin", old):
        os.utime(path, (0, time.time() - 25 * 3600))
    read(chats)
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


def test_a_folder_that_cannot_be_written(chats: Chats) -> None:
    with pytest.raises(StageError, match=r"cannot write the cache.*set `cache`"):
        read(chats, cache="/proc/no")


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
    assert cache_folder() == tmp_path / "pipetrain"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home/.cache/pipetrain"
