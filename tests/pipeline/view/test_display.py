"""The display of a launching process: the choice, and events as JSON."""

from __future__ import annotations

import io
import json
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.distributed.environment import TORCHRUN_VARIABLES
from pipeline.execution.rundir import locked
from pipeline.utils.files import replace_text
from pipeline.utils.terminal import display, set_display
from pipeline.view.display import Display, JsonEvents
from pipeline.view.run import Run
from tests.pipeline.view.folders import SLOTS, add, done, made, step
from tests.pipeline.view.test_screen import Failing


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
    set_display("")
    monkeypatch.setattr("sys.stdout", Terminal() if terminal else io.StringIO())
    monkeypatch.setenv("TERM", term)
    Display(**options)
    assert display() == expected
    for name in TORCHRUN_VARIABLES:  # a rank of another launcher writes lines
        monkeypatch.setenv(name, "0")
    Display(**options)
    assert display() == expected.replace("live", "lines")


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
