"""What a launching process shows of its run, lines, a live display or events, and its failures."""

from __future__ import annotations

import io
import json
import os
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from pipeline.distributed.environment import TORCHRUN_VARIABLES
from pipeline.distributed.signals import Interrupted
from pipeline.execution.rundir import locked
from pipeline.utils import terminal as output
from pipeline.utils.files import replace_text
from pipeline.view.run import Run
from pipeline.view.screen import Display, JsonEvents, LinePipe, LiveDisplay, Screen, View
from tests.pipeline.view.folders import SLOTS, add, done, made, step


class Failing(View):
    """Raises at its second refresh, and whenever it is asked to end."""

    prints = True

    def __init__(self, error: BaseException) -> None:
        self.error, self.refreshed, self.abandoned = error, 0, 0

    def refresh(self, lines: deque[str]) -> None:
        self.refreshed += 1
        if self.refreshed == 2:
            raise self.error
        lines.clear()

    def close(self, lines: deque[str]) -> None:
        raise self.error

    def end(self) -> None:
        raise self.error

    def abandon(self) -> None:
        self.abandoned += 1


@pytest.mark.parametrize("error", [OSError(5, "terminal is gone"), SystemExit(1), KeyError("step")])
def test_a_view_that_fails_ends_nothing_else(
    error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = Failing(error)
    screen = Screen(lambda: failing)
    for number in range(4):
        os.write(screen.output or -1, f"line {number}\n".encode())
        screen.refresh()
    os.write(screen.output or -1, b"line 4")
    screen.close()
    screen.end()
    assert (failing.refreshed, failing.abandoned) == (2, 1)
    first, *lines = capsys.readouterr().err.splitlines()
    assert first.startswith("the display has ended: ")
    assert lines == [f"line {number}" for number in (1, 2, 3, 4)]


def test_a_view_or_pipe_that_cannot_be_made_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make() -> View:
        raise OSError(28, "no space left")

    monkeypatch.setattr("pipeline.view.screen.LinePipe", make)
    failing = Failing(OSError("closed"))
    for screen in (Screen(make), Screen(lambda: failing)):
        screen.refresh()
        screen.close()
        assert screen.output is None
    assert capsys.readouterr().err.count("no space left") == 2
    assert (failing.refreshed, failing.abandoned) == (0, 1)


def test_a_signal_is_not_a_failure_of_the_view() -> None:
    screen = Screen(lambda: Failing(Interrupted(15)))
    screen.refresh()
    with pytest.raises(Interrupted):
        screen.refresh()


def test_standard_error_is_usable_when_the_terminal_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        gone = False

        def write(self, text: str) -> int:
            if self.gone:
                raise OSError(5, "terminal is gone")
            return super().write(text)

    terminal, errors = Gone(), io.StringIO()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", errors)
    run = Run(made(tmp_path / "run"), SLOTS)
    console = Console(file=terminal, force_terminal=True)
    screen = Screen(lambda: LiveDisplay(run, "run", "here", console))
    assert screen.output is not None
    terminal.gone = True
    os.write(screen.output, b"a line\nanother\n")
    screen.refresh()
    print("restarting", file=sys.stderr)
    os.write(screen.output, b"a warning\n")
    screen.close()
    assert errors.getvalue().splitlines() == [
        "the display has ended: terminal is gone", "restarting", "a line", "another", "a warning",
    ]  # fmt: skip
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(screen.output)


def test_lines_of_another_process() -> None:
    pipe = LinePipe()
    assert list(pipe.lines()) == []
    os.write(pipe.write, b"one\ntw")
    assert list(pipe.lines()) == ["one"]
    os.write(pipe.write, b"o\n" + b"".join(b"\r%d %%" % number for number in range(101)) + b"\n")
    assert list(pipe.lines()) == ["two", "100 %"]  # a bar is one line
    os.write(pipe.write, b"thr\xff")
    assert pipe.close() == ["thr\N{REPLACEMENT CHARACTER}"]


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
    terminal: bool, term: str, options: dict[str, bool], expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    output.shows = ""
    monkeypatch.setattr("sys.stdout", Terminal() if terminal else io.StringIO())
    monkeypatch.setenv("TERM", term)
    Display(**options)
    assert output.shows == expected
    for name in TORCHRUN_VARIABLES:  # a rank of another launcher writes lines
        monkeypatch.setenv(name, "0")
    Display(**options)
    assert output.shows == expected.replace("live", "lines")


def test_gpus_are_recorded_after_the_end_of_a_display(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Path] = []

    class Record:
        def __init__(self, folder: Path) -> None:
            self.folder = folder

        def look(self) -> None:
            looks.append(self.folder)
            if len(looks) == 1:
                raise KeyError("a defect")

    monkeypatch.setattr("pipeline.execution.gpu_records.HardwareRecord", Record)
    failing = Failing(OSError(5, "terminal is gone"))
    monkeypatch.setattr(Display, "_view", lambda self, plan, folder: failing)
    plan = SimpleNamespace(view=SimpleNamespace(device="cuda"))
    with Display().shown(plan, tmp_path) as screen:  # type: ignore[arg-type]
        for _ in range(4):
            screen.refresh()
    assert (failing.refreshed, looks) == (2, [tmp_path] * 4)


def told(screen: JsonEvents, out: io.StringIO) -> list[tuple[str, int | None]]:
    """Return kind and step of the events since the last call."""
    screen.end()
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    out.seek(0)
    out.truncate()
    return [(one["event"], one.get("step")) for one in events]


def test_events_as_json(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", [{"event": "run started", "time": 5.0, "procs": 1}])
    out = io.StringIO()
    screen = JsonEvents(Run(folder, SLOTS), out)
    add(folder, [step(1), {"step": 1, "eval_loss": 2.0}, {"step": 2, "anomaly": "a spike"}])
    doing = {"name": "exporting", "done": 1, "total": None, "unit": "files", "seconds": 0.5}
    (folder / "activity.json").write_text(json.dumps(doing))
    with locked(folder):
        screen.close(deque())
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [one["event"] for one in events] == [
        "run", "run started", "step", "evaluation", "anomaly", "activity",
    ]  # fmt: skip
    assert all(one["schema_version"] == 1 and isinstance(one["time"], float) for one in events)
    assert events[0]["slots"] == SLOTS
    assert events[1] == {"schema_version": 1, "time": 5.0, "event": "run started", "procs": 1}
    assert events[2] == {"schema_version": 1, "event": "step", **step(1)}
    assert events[5]["name"] == "exporting"


def test_a_resumed_run_tells_what_is_new(tmp_path: Path) -> None:
    events = [
        {"event": "run started", "time": 1000.0},
        {"event": "run failed", "time": 1002.5},
        {"event": "slot set aside", "time": 1002.6, "slot": "export"},
        {"event": "run started", "time": 1002.7},
    ]
    folder = made(tmp_path / "run", events, [step(1), {"step": 1, "eval_loss": 2.0}, step(2)])
    out = io.StringIO()
    screen = JsonEvents(Run(folder, SLOTS), out)
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
    screen = JsonEvents(Run(folder, SLOTS), out)
    told(screen, out)
    add(folder, [step(1), {"step": 1, "eval_loss": 2.0}, step(3)])
    made(folder, [done("train", 1002.0)])
    assert told(screen, out) == [
        ("step", 1), ("evaluation", 1), ("slot finished", None), ("step", 3),
    ]  # fmt: skip
