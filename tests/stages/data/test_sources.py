"""Files that patterns match, within a bound."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from stages.data import sources
from stages.data.sources import file_problems, find_files


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
