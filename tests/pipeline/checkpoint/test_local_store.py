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
def direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of what is written past the system's cache, as that happens; skips on file
    systems that take nothing so."""
    try:
        probe = os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        os.pwrite(probe, page_aligned(PAGE), 0)
        os.close(probe)
    except OSError:
        pytest.skip("this file system has no direct writes")
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
    assert direct == [8 * PAGE, 10 * PAGE, 18 * PAGE]


def refused_at_open(direct: list[int], patch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no such way")
        return opened(path, flags, mode)

    patch.setattr(os, "open", refuse)


def refused_at_the_first_write(
    direct: list[int], patch: pytest.MonkeyPatch, number: int = errno.EINVAL
) -> None:
    pwrite = os.pwrite

    def refuse(descriptor: int, data: memoryview, offset: int) -> int:
        done = pwrite(descriptor, data, offset)
        if direct:
            direct.clear()
            raise OSError(number, os.strerror(number))
        return done

    patch.setattr(os, "pwrite", refuse)


def refused_for_its_size(direct: list[int], patch: pytest.MonkeyPatch) -> None:
    refused_at_the_first_write(direct, patch, errno.ENOMEM)


@pytest.mark.parametrize(
    "refused", [refused_at_open, refused_at_the_first_write, refused_for_its_size]
)
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


def test_pages_that_lie_elsewhere_do_not_keep_others_from_the_disk(
    tmp_path: Path, direct: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, odd = os.pwrite, data_of(13 * PAGE)[1 : 12 * PAGE + 1]

    def aligned(descriptor: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT and data.obj is odd.obj:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", aligned)
    transaction, memory = LocalStore(tmp_path).begin(NAME, "one"), data_of(12 * PAGE)
    with transaction.create("data", 36 * PAGE, shared=False) as sink:
        for number, data in enumerate([memory, odd, memory]):
            sink.write(number * 12 * PAGE, data)
    assert direct == [12 * PAGE, 12 * PAGE]
    written = (tmp_path / transaction.folder / "data").read_bytes()
    assert written == bytes(memory) + bytes(odd) + bytes(memory)


def test_a_disk_that_fails_later_fails(
    tmp_path: Path, direct: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite

    def fail(descriptor: int, data: memoryview, offset: int) -> int:
        if direct:
            raise OSError(errno.EIO, "Input/output error")
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", fail)
    transaction, memory = LocalStore(tmp_path).begin(NAME, "one"), data_of(24 * PAGE)
    sink = transaction.create("data", 24 * PAGE, shared=False)
    sink.write(0, memory[: 12 * PAGE])
    with pytest.raises(OSError, match="Input/output error"):
        sink.write(12 * PAGE, memory[12 * PAGE :])
    sink.abandon()
