"""What a launching process shows: the choice, the pipe from rank 0, and events as JSON."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from pipeline.distributed.environment import CONTRACT
from pipeline.execution.rank_logging import SCREEN
from pipeline.view.events import JsonScreen
from pipeline.view.follow import Follower
from pipeline.view.screen import Display, LinePipe
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
