"""What a launching process shows: the choice, the pipe from rank 0, and events as JSON."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

from pipeline.distributed.environment import CONTRACT
from pipeline.distributed.signals import Interrupted
from pipeline.execution.rank_logging import SCREEN
from pipeline.execution.rundir import locked
from pipeline.utils.files import replace_text
from pipeline.view.events import JsonScreen
from pipeline.view.follow import Follower
from pipeline.view.screen import Display, Harmless, LinePipe, Screen
from tests.pipeline.view.folders import SLOTS, add, made, step


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCREEN, "")
    monkeypatch.setenv("TERM", "xterm")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "term", "options", "expected"),
    [
        (True, "xterm", {}, "live"),
        (False, "xterm", {}, "lines"),
        (True, "dumb", {}, "lines"),
        (True, "", {}, "lines"),
        (True, "xterm", {"quiet": True}, "quiet"),
        (True, "xterm", {"verbose": True}, "live verbose"),
        (False, "xterm", {"verbose": True}, "lines verbose"),
    ],
)
def test_what_is_shown(
    terminal: bool,
    term: str,
    options: dict[str, bool],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdout", Terminal() if terminal else io.StringIO())
    monkeypatch.setenv("TERM", term)
    Display(**options)
    assert os.environ[SCREEN] == expected


def test_a_rank_of_another_launcher_writes_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", Terminal())
    for name in CONTRACT:
        monkeypatch.setenv(name, "0")
    Display()
    assert os.environ[SCREEN] == "lines"


def test_lines_of_another_process() -> None:
    pipe = LinePipe()
    assert list(pipe.lines()) == []
    os.write(pipe.write, b"one\ntw")
    assert list(pipe.lines()) == ["one"]
    os.write(pipe.write, b"o\nthr\xff")
    assert list(pipe.lines()) == ["two"]
    assert list(pipe.close()) == ["thr\N{REPLACEMENT CHARACTER}"]


def test_events_as_json(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", [{"event": "run started", "time": 5.0, "procs": 1}])
    out = io.StringIO()
    screen = JsonScreen(Follower(folder, SLOTS), out)
    add(folder, [step(1), {"step": 1, "eval_loss": 2.0}, {"step": 2, "anomaly": "a spike"}])
    (folder / "activity.json").write_text('{"name": "exporting", "done": 1}')
    with locked(folder):
        screen.close()
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [one["event"] for one in events] == [
        "run", "run started", "step", "evaluation", "anomaly", "activity",
    ]  # fmt: skip
    assert all(one["schema_version"] == 1 and isinstance(one["time"], float) for one in events)
    assert events[0]["slots"] == SLOTS
    assert events[1] == {"schema_version": 1, "time": 5.0, "event": "run started", "procs": 1}
    assert events[2] == {"schema_version": 1, "event": "step", **step(1)}
    assert events[5]["name"] == "exporting"


def told(screen: JsonScreen, out: io.StringIO) -> list[tuple[str, int | None]]:
    """Return kind and step of the events since the last call."""
    screen.end()
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    out.seek(0)
    out.truncate()
    return [(one["event"], one.get("step")) for one in events]


def test_a_resumed_run_tells_what_is_new(tmp_path: Path) -> None:
    events = [
        {"event": "run started", "time": 1000.0},
        {"event": "run failed", "time": 1002.5},
        {"event": "slot set aside", "time": 1002.6, "slot": "export"},
        {"event": "run started", "time": 1002.7},
    ]
    folder = made(tmp_path / "run", events, [step(1), {"step": 1, "eval_loss": 2.0}, step(2)])
    out = io.StringIO()
    screen = JsonScreen(Follower(folder, SLOTS), out)
    assert told(screen, out) == [("run", None), ("slot set aside", None), ("run started", None)]
    add(folder, [step(3), step(4), {"step": 4, "eval_loss": 2.0}])
    assert told(screen, out) == [("step", 3), ("step", 4), ("evaluation", 4)]
    replace_text(folder / "metrics.jsonl", "")  # a restart goes back to step 3
    made(
        folder, [{"event": "run failed", "time": 1004.5}, {"event": "run started", "time": 1005.0}]
    )
    add(folder, [step(1), step(2), step(3), step(4, time=1005.5), step(5, time=1006.0)])
    assert told(screen, out) == [
        ("run failed", None), ("run started", None), ("step", 4), ("step", 5),
    ]  # fmt: skip


def test_what_is_read_together_is_in_order_of_time(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", [{"event": "run started", "time": 1000.0}])
    out = io.StringIO()
    screen = JsonScreen(Follower(folder, SLOTS), out)
    told(screen, out)
    add(folder, [step(1), {"step": 1, "eval_loss": 2.0}, step(3)])
    made(folder, [{"event": "slot finished", "time": 1002.0, "slot": "train"}])
    assert told(screen, out) == [
        ("step", 1), ("evaluation", 1), ("slot finished", None), ("step", 3),
    ]  # fmt: skip


class Failing(Screen):
    """Raises at its second refresh, and whenever it is asked to end."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.refreshed, self.drained = error, 0, 0

    def refresh(self) -> None:
        self.refreshed += 1
        if self.refreshed == 2:
            raise self.error

    def close(self) -> None:
        raise self.error

    def end(self) -> None:
        raise self.error

    def drain(self) -> None:
        self.drained += 1


@pytest.mark.parametrize("error", [OSError(5, "terminal is gone"), SystemExit(1), KeyError("step")])
def test_a_screen_that_fails_ends_nothing_else(
    error: BaseException, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.__stderr__", sys.stderr)
    failing = Failing(error)
    screen = Harmless(lambda: failing)
    for _ in range(4):
        screen.refresh()
    screen.close()
    screen.end()
    assert (failing.refreshed, failing.drained) == (2, 2)
    assert capsys.readouterr().err.count("the display has ended: ") == 1


def test_a_screen_that_cannot_be_made_ends_nothing_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Screen:
        raise OSError(28, "no space left")

    monkeypatch.setattr("sys.__stderr__", sys.stderr)
    screen = Harmless(make)
    screen.refresh()
    screen.close()
    assert screen.output is None
    assert "no space left" in capsys.readouterr().err


def test_a_signal_is_not_a_failure_of_the_screen() -> None:
    screen = Harmless(lambda: Failing(Interrupted(15)))
    screen.refresh()
    with pytest.raises(Interrupted):
        screen.refresh()


def test_a_bar_that_is_drawn_again_and_again_is_one_line() -> None:
    pipe = LinePipe()
    os.write(pipe.write, b"".join(b"\r%d %%" % number for number in range(101)) + b"\n")
    assert list(pipe.lines()) == ["100 %"]
    list(pipe.close())
