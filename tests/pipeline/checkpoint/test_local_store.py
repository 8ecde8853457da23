"""Checkpoints in a folder of a file system."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.checkpoint.local_store import LocalStore
from pipeline.utils.files import PAGE, page_aligned

NAME = "step-00000001"


def test_a_report_may_start_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 commits when it sees the last report, whose writer has yet to sync the folder."""
    store = LocalStore(tmp_path)
    transaction = store.begin(NAME, "one")
    rename = Path.rename

    def renamed(path: Path, target: Path) -> Path:
        moved = rename(path, target)
        if path.name == "report.partial":
            store.commit(transaction, b"{}")
        return moved

    monkeypatch.setattr(Path, "rename", renamed)
    transaction.put("report", b"whole")
    assert store.get(NAME, "report") == b"whole"
    assert store.names() == [NAME]


def data_of(size: int) -> memoryview:
    """Return whole pages of memory, no two of them alike."""
    memory = page_aligned(size)
    memory[:] = bytes((at // 7 + at // PAGE) % 251 for at in range(size))
    return memory


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of what is written past the system's cache, as that happens."""
    pwrite, sizes = os.pwrite, []

    def written(descriptor: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            sizes.append(len(data))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", written)
    return sizes


@pytest.mark.parametrize("shared", [False, True])
def test_pages_go_past_the_cache_and_edges_do_not(
    shared: bool, tmp_path: Path, direct: list[int]
) -> None:
    store, size = LocalStore(tmp_path), 40 * PAGE
    transaction, memory = store.begin(NAME, "one"), data_of(size)
    cuts = [0, 100, 100 + 9 * PAGE, 20 * PAGE, 20 * PAGE + 3, size - 1, size]
    with transaction.create("data", size, shared=shared) as sink:
        for low, high in itertools.pairwise(cuts):
            sink.write(low, memory[low:high])
    assert (tmp_path / transaction.folder / "data").read_bytes() == bytes(memory)
    if not direct:
        pytest.skip("this file system has no direct writes")
    assert direct == [8 * PAGE, 10 * PAGE, 18 * PAGE]


def refused_at_open(direct: list[int], patch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no such way")
        return opened(path, flags, mode)

    patch.setattr(os, "open", refuse)


def refused_at_the_first_write(direct: list[int], patch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite

    def refuse(descriptor: int, data: memoryview, offset: int) -> int:
        done = pwrite(descriptor, data, offset)
        if direct:
            direct.clear()
            raise OSError(errno.EINVAL, "the memory is not aligned")
        return done

    patch.setattr(os, "pwrite", refuse)


@pytest.mark.parametrize("refused", [refused_at_open, refused_at_the_first_write])
def test_file_systems_without_direct_writes(
    refused: Callable[[list[int], pytest.MonkeyPatch], None],
    tmp_path: Path, direct: list[int], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    refused(direct, monkeypatch)
    transaction, memory = LocalStore(tmp_path).begin(NAME, "one"), data_of(20 * PAGE)
    with transaction.create("data", len(memory), shared=False) as sink:
        sink.write(0, memory[: 8 * PAGE])
        sink.write(8 * PAGE, memory[8 * PAGE :])
    assert direct == []
    assert (tmp_path / transaction.folder / "data").read_bytes() == bytes(memory)


def test_a_full_disk_is_no_reason_to_try_another_way(
    tmp_path: Path, direct: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    transaction, memory = LocalStore(tmp_path).begin(NAME, "one"), data_of(8 * PAGE)

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "pwrite", full)
    with (
        pytest.raises(OSError, match="no room"),
        transaction.create("data", len(memory), shared=False) as sink,
    ):
        sink.write(0, memory)
    assert not [
        one for one in Path("/proc/self/fd").iterdir() if str(tmp_path) in str(one.resolve())
    ]
