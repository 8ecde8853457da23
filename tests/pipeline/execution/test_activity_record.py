"""Rank 0's long work in the run's folder and its log."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from pipeline.execution.activity_record import FILE, ActivityRecord, clear
from pipeline.utils import activities
from pipeline.utils.activities import activity, show_in


def test_in_a_runs_folder_and_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(activities, "LOOK_SECONDS", 3600)  # nothing looks by itself
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    caplog.set_level(logging.INFO)
    place = ActivityRecord(logging.getLogger("test"), tmp_path)
    file = tmp_path / FILE
    with show_in(place), activity("outer", 10, "files"):
        assert json.loads(file.read_text())["name"] == "outer"
        with activity("inner", unit="rows") as inner:
            now[0] += 12
            inner.advance(24)
            activities.look()
            assert json.loads(file.read_text()) == {
                "name": "inner", "done": 24, "total": None, "unit": "rows", "seconds": 12.0,
            }  # fmt: skip
        assert json.loads(file.read_text())["name"] == "outer"
    assert not file.exists()
    assert caplog.messages == ["inner: 24 rows, 2 rows a second"]


def test_a_new_start_forgets_what_a_killed_rank_was_doing(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{}")
    ActivityRecord(logging.getLogger("rank 1"), None)
    assert (tmp_path / FILE).exists()
    ActivityRecord(logging.getLogger("rank 0"), tmp_path)
    assert not (tmp_path / FILE).exists()
    (tmp_path / FILE).write_text("{}")
    clear(tmp_path)
    clear(tmp_path)
    assert not (tmp_path / FILE).exists()


def test_a_folder_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    place = ActivityRecord(logging.getLogger("test"), tmp_path / "gone")
    with show_in(place), activity("working") as work:
        work.advance()
    assert work.done == 1
