"""Long work: how far it is, in words and on a terminal."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest

from pipeline.cli import CommandActivities
from pipeline.execution.rank_logging import ACTIVITY_FILE, ActivityRecord
from pipeline.utils import activities
from pipeline.utils.activities import BYTES, Activity, activity, show_in


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that is set by hand: its one entry. Nothing looks by itself."""
    now = [100.0]
    monkeypatch.setattr(activities, "LOOK_SECONDS", 3600)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("made", "done", "expected"),
    [
        (("tokenising", 2000, "rows"), 500, "tokenising: 500 rows of 2,000 rows (25 %)"),
        (("writing", 2e9, BYTES), 5e8, "writing: 500.0 MB of 2.0 GB (25 %)"),
        (("tokenising", None, "rows"), 500, "tokenising: 500 rows, 50 rows a second"),
        (("tokenising", None, "documents"), 1, "tokenising: 1 document, 0 documents a second"),
        (("proving", None, ""), 0, "proving (0:10)"),
        (("nothing", 0, "rows"), 0, "nothing: 0 rows of 0 rows (100 %)"),
    ],
)
def test_in_words(
    made: tuple[str, float | None, str], done: float, expected: str, clock: list[float]
) -> None:
    work = Activity(*made)
    work.done = done
    clock[0] += 10
    assert work.describe() == expected


def test_a_copy_in_words(clock: list[float]) -> None:
    work = Activity("loading", None, BYTES)
    work.done = 1.5e9
    clock[0] += 2
    assert work.summary() == "1.5 GB in 2.0 s (750.0 MB/s)"


class Seen:
    """A place that notes what is done when it is asked to show it, and its negative at the end."""

    def __init__(self) -> None:
        self.notes: list[float] = []
        self.asked = threading.Condition()

    def changed(self, work: Activity) -> None:
        with self.asked:
            self.notes.append(work.done)
            self.asked.notify()

    def ended(self, work: Activity) -> None:
        self.notes.append(-work.done)


def test_a_call_that_never_says_how_far_it_is_is_shown() -> None:
    place = Seen()
    with show_in(place), activity("proving") as work:
        work.advance(3)
        with place.asked:
            assert place.asked.wait_for(lambda: place.notes.count(3) >= 2, timeout=60)
    assert (place.notes[0], place.notes[-1]) == (0, -3)
    activities.look()
    assert place.notes[-1] == -3


def test_an_end_by_an_error(clock: list[float]) -> None:
    place = Seen()
    with pytest.raises(ValueError, match="too bad"), show_in(place), activity("proving"):
        raise ValueError("too bad")
    assert place.notes[-1] == 0
    activities.look()
    assert len(place.notes) == 2


def test_a_place_that_is_closed_does_not_end_the_work(capfd: pytest.CaptureFixture[str]) -> None:
    class Closed(Seen):
        def changed(self, work: Activity) -> None:
            super().changed(work)
            if len(self.notes) > 1:
                raise BrokenPipeError

    place = Closed()
    with show_in(place), activity("proving"), place.asked:
        assert place.asked.wait_for(lambda: len(place.notes) > 1, timeout=60)
    assert "Traceback" not in capfd.readouterr().err


def test_in_a_runs_folder_and_its_log(
    tmp_path: Path, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    place = ActivityRecord(logging.getLogger("test"), tmp_path)
    file = tmp_path / ACTIVITY_FILE
    with show_in(place), activity("outer", 10, "files"):
        assert json.loads(file.read_text())["name"] == "outer"
        with activity("inner", unit="rows") as inner:
            clock[0] += 12
            inner.advance(24)
            activities.look()
            assert json.loads(file.read_text()) == {
                "name": "inner", "done": 24, "total": None, "unit": "rows", "seconds": 12.0,
            }  # fmt: skip
        assert json.loads(file.read_text())["name"] == "outer"
    assert not file.exists()
    assert caplog.messages == ["inner: 24 rows, 2 rows a second"]


def test_a_folder_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    place = ActivityRecord(logging.getLogger("test"), tmp_path / "gone")
    with show_in(place), activity("working") as work:
        work.advance()
    assert work.done == 1


def test_a_command_without_a_terminal_prints_lines(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with show_in(CommandActivities()), activity("verifying", 100, BYTES) as work:
        for _ in range(30):
            clock[0] += 1
            work.advance(1)
            activities.look()
    assert capsys.readouterr().err.splitlines() == [
        "verifying: 10 B of 100 B (10 %)",
        "verifying: 20 B of 100 B (20 %)",
        "verifying: 30 B of 100 B (30 %)",
    ]
