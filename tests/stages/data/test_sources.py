"""Files that patterns match, within a bound, and read again only when they may have changed; and
splits of data sets of the hub."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline import StageError
from stages.data import sources
from stages.data.sources import Source, file_digests, file_problems, find_files
from tests.stages.data.conftest import Chats
from tests.stages.data.fakes import ids
from tests.support.hub import HubCache, hub_cache

__all__ = ["hub_cache"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("pattern", ["/**/*", "/**", "/**/*.jsonl"])
def test_the_whole_machine_is_not_searched(pattern: str) -> None:
    began = time.process_time()
    (problem,) = file_problems("files", pattern)
    assert problem.message == f"{pattern} looks through the whole machine"
    assert find_files(pattern) == []
    assert time.process_time() - began < 1


def test_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MOST_FILES", 3)
    for name in "abcd":
        (tmp_path / f"{name}.txt").touch()
    (problem,) = file_problems("files", f"{tmp_path}/**/*.txt")
    assert problem.message == f"{tmp_path}/**/*.txt matches more than 3 files"
    (tmp_path / "d.txt").unlink()
    assert not list(file_problems("files", f"{tmp_path}/**/*.txt"))


def test_matches_are_sorted_by_name_and_are_files(tmp_path: Path) -> None:
    for name in ("a/x.txt", "a-b.txt", "a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / "b.txt")
    (tmp_path / "c.txt").symlink_to("/dev/zero")
    found = find_files(f"{tmp_path}/**/*.txt")
    assert [str(each.relative_to(tmp_path)) for each in found] == ["a-b.txt", "a.txt", "a/x.txt"]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Record the names of the files that are read; written files count as written long ago."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "SETTLED", -60.0)
    content, names = sources.content_digest, []

    def watched(path: Path) -> str:
        names.append(path.name)
        return content(path)

    monkeypatch.setattr(sources, "content_digest", watched)
    return names


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
    monkeypatch.setattr(sources, "SETTLED", 60.0)
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


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace `load_dataset` by one that accepts the right arguments only, and records them."""
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


def hub(**fields: Any) -> dict[str, Any]:
    return {"files": (), "sources": (Source(dataset="owner/name", **fields),)}


def test_rows_of_the_hub(chats: Chats, asked: list[Any]) -> None:
    given = hub(config="en", revision=COMMIT)
    assert chats.texts(**given) == ["a.", "b.", "c."]
    assert asked == [("owner/name", "en", "train", COMMIT)]
    blocks = chats.text(**given, sequence_length=3).train
    assert [blocks[i].input_ids[0] for i in range(len(blocks))] == ids("abc")


def test_a_tag_is_resolved(chats: Chats, asked: list[Any], hub_cache: HubCache) -> None:
    hub_cache.refer("dataset", "owner/name", v1="1" * 40, main="2" * 40)
    prints = [chats.run(**hub(revision=each)).fingerprint for each in ("v1", None, "1" * 40)]
    assert [revision for *_, revision in asked] == ["1" * 40, "2" * 40, "1" * 40]
    assert prints[0] == prints[2] != prints[1]


def test_mistakes_on_the_hub(chats: Chats, asked: list[Any]) -> None:
    assert chats.error(**hub(split="trian", revision=COMMIT)) == (
        'cannot get owner/name/trian from the hub: Unknown split "trian". '
        "Should be one of ['train']."
    )
    with pytest.raises(StageError, match=r"no column 'body'; it has \['text', 'other'\]"):
        chats.text(**hub(revision=COMMIT), text_key="body")
