"""Text for people."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.utils.text import align, counted, human, plural, shown_path, sparkline


def test_plurals() -> None:
    assert [plural(1, "process"), plural(2, "process")] == ["1 process", "2 processes"]
    assert [plural(0, "error"), plural(3, "micro-batch")] == ["0 errors", "3 micro-batches"]


def test_what_is_counted() -> None:
    found = [counted(number, "rows") for number in (0, 1, 1.4, 5000)]
    assert found == ["0 rows", "1 row", "1 row", "5,000 rows"]
    assert counted(12, "") == "12"


def test_columns_are_aligned() -> None:
    rows = [("name", "size", "more"), ("a", "10"), ("longer", "1", "x")]
    assert list(align(rows)) == ["name    size  more", "a         10", "longer     1     x"]
    assert list(align(rows[1:], left=2)) == ["a       10", "longer  1   x"]
    assert list(align([])) == []


def test_a_curve_of_one_line() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([1.0], 10) == "▁"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([1.0, float("nan"), 2.0], 10) == "▁█"


def test_paths_in_the_working_folder_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown_path(tmp_path / "a" / "b") == "a/b"
    assert shown_path(tmp_path) == "."
    assert shown_path(tmp_path.parent / "other") == str(tmp_path.parent / "other")
    assert shown_path(Path("a")) == "a"


def test_human() -> None:
    sizes = (999, 1000, 2_500_000, 7e15)
    assert [human(size) for size in sizes] == ["999 B", "1.0 KB", "2.5 MB", "7000.0 TB"]
