"""Checkpoints in a folder of a file system."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.store import LocalStore
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
    store.put(*transaction.at("report"), b"whole")
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
    with store.create(transaction.folder, "data", size, shared=shared) as sink:
        for low, high in itertools.pairwise(cuts):
            sink(low, memory[low:high])
    assert (tmp_path / transaction.folder / "data").read_bytes() == bytes(memory)
    assert direct == [8 * PAGE, 10 * PAGE, 18 * PAGE]


def fail(
    patch: pytest.MonkeyPatch, name: str, number: int, when: Callable[..., bool] = lambda *_: True
) -> None:
    """Have a function of `os` fail where its first two arguments are such."""
    real = getattr(os, name)

    def called(one: Any, other: Any, *rest: Any) -> Any:
        if when(one, other):
            raise OSError(number, os.strerror(number))
        return real(one, other, *rest)

    patch.setattr(os, name, called)


def is_direct(descriptor: int, *_: object) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def opens_direct(path: object, flags: int) -> bool:
    return bool(flags & os.O_DIRECT)


@pytest.mark.parametrize(
    ("name", "number", "when"),
    [
        ("open", errno.EINVAL, opens_direct),
        ("pwrite", errno.EINVAL, is_direct),
        ("pwrite", errno.ENOMEM, is_direct),
    ],
)
def test_file_systems_without_direct_writes(
    name: str, number: int, when: Callable[..., bool],
    tmp_path: Path, direct: list[int], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fail(monkeypatch, name, number, when)
    store = LocalStore(tmp_path)
    transaction, memory = store.begin(NAME, "one"), data_of(20 * PAGE)
    with store.create(transaction.folder, "data", len(memory), shared=False) as sink:
        sink(0, memory[: 8 * PAGE])
        sink(8 * PAGE, memory[8 * PAGE :])
    assert direct == []
    assert (tmp_path / transaction.folder / "data").read_bytes() == bytes(memory)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_errors_that_another_way_does_not_mend(
    number: int, tmp_path: Path, direct: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, and one that fails after it has taken some pages."""
    fail(monkeypatch, "pwrite", number, lambda *_: number == errno.ENOSPC or bool(direct))
    store = LocalStore(tmp_path)
    transaction, memory = store.begin(NAME, "one"), data_of(24 * PAGE)
    with (
        pytest.raises(OSError, match=os.strerror(number)),
        store.create(transaction.folder, "data", len(memory), shared=False) as sink,
    ):
        [sink(half, memory[half : half + 12 * PAGE]) for half in (0, 12 * PAGE)]
    assert len(direct) == (number == errno.EIO)
    assert not [
        one for one in Path("/proc/self/fd").iterdir() if str(tmp_path) in str(one.resolve())
    ]


def test_pages_that_lie_elsewhere_do_not_keep_others_from_the_disk(
    tmp_path: Path, direct: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = data_of(13 * PAGE)[1 : 12 * PAGE + 1]
    fail(
        monkeypatch, "pwrite", errno.EINVAL, lambda fd, data: is_direct(fd) and data.obj is odd.obj
    )
    store = LocalStore(tmp_path)
    transaction, memory = store.begin(NAME, "one"), data_of(12 * PAGE)
    with store.create(transaction.folder, "data", 36 * PAGE, shared=False) as sink:
        for number, data in enumerate([memory, odd, memory]):
            sink(number * 12 * PAGE, data)
    assert direct == [12 * PAGE, 12 * PAGE]
    written = (tmp_path / transaction.folder / "data").read_bytes()
    assert written == bytes(memory) + bytes(odd) + bytes(memory)


def test_folders_on_the_way_are_everybody_s_and_the_last_its_owner_s(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        LocalStore(tmp_path / "team" / "mine" / "checkpoints").begin(NAME, "x")
    finally:
        os.umask(before)
    places = ("team", "team/mine", "team/mine/checkpoints")
    assert [oct((tmp_path / place).stat().st_mode & 0o777) for place in places] == [
        "0o775", "0o775", "0o700"
    ]  # fmt: skip
