"""Files are read again only when they may have changed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from stages import digests
from stages.digests import file_digests
from tests.support.runs import spied


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Record the names of the files that are read; written files count as written long ago."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "SETTLED", -60.0)
    return spied(monkeypatch, digests, "content_digest", lambda path: path.name)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.write_text(path.name * 9)
    return paths


def expected(files: list[Path]) -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]


def test_what_has_not_changed_is_not_read_again(read: list[str], files: list[Path]) -> None:
    assert file_digests(files) == expected(files)
    assert sorted(read) == ["a", "b"]
    read.clear()
    assert file_digests(files) == expected(files)
    assert read == []


def test_content_changed_under_the_same_size_and_date(read: list[str], files: list[Path]) -> None:
    file_digests(files)
    before = files[1].stat()
    with files[1].open("r+b") as file:
        file.write(b"X")
    os.utime(files[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    read.clear()
    assert file_digests(files) == expected(files)
    assert read == ["b"]


def test_another_file_moved_into_its_place(read: list[str], files: list[Path]) -> None:
    file_digests(files)
    other = files[0].with_name("c")
    other.write_text("z" * 9)
    other.replace(files[0])
    assert file_digests(files) == expected(files)


def test_a_file_that_was_just_written_is_read_again(
    read: list[str], files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "SETTLED", 60.0)
    for _ in range(2):
        assert file_digests(files) == expected(files)
    assert sorted(read) == ["a", "a", "b", "b"]


@pytest.mark.parametrize("damage", [b"0", b"", b"[]"])
def test_a_damaged_record_is_not_believed(
    read: list[str], files: list[Path], tmp_path: Path, damage: bytes
) -> None:
    found = file_digests(files)
    (record,) = (tmp_path / "cache/pipetrain/digests").iterdir()
    text = record.read_bytes()
    record.write_bytes((damage and text.replace(found[0].encode(), damage * 64)) or damage)
    assert file_digests(files) == found
    assert len(read) == 4


def test_nowhere_to_keep_them(
    read: list[str], files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert file_digests(files) == expected(files)
