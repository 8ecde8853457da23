"""The end of a run is recorded before its report, which keeps nobody waiting."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.pipe import Pipe

SLOW = """
import sys, time

def look(event, arguments):
    if event == "open" and str(arguments[0]).endswith("report.html.tmp"):
        time.sleep(600)

sys.addaudithook(look)
"""
"""Has a process write reports as to a disk that does not answer."""


def started(pipe: Pipe, tmp_path: Path, fault: str) -> subprocess.Popen[str]:
    """Return a run whose report takes forever."""
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(SLOW)
    path = os.pathsep.join([str(hooks), pipe.environment["PYTHONPATH"]])
    recipe = pipe.recipe(train={"fault": fault})
    command = ("-m", "pipetrain", "run", str(recipe), "--run-dir", str(pipe.run_dir))
    return pipe.start(*command, PYTHONPATH=path)


def recorded(pipe: Pipe, end: str = "run stopped") -> bool:
    return (pipe.run_dir / "journal.jsonl").exists() and pipe.events()[-1]["event"] == end


def test_a_stopped_run_writes_no_report(pipe: Pipe, tmp_path: Path) -> None:
    """Its exit code keeps no scheduler waiting."""
    waiting = started(pipe, tmp_path, "hang")
    pipe.wait_for(lambda: (pipe.run_dir / "calls.txt").exists() and "train" in pipe.calls())
    waiting.send_signal(signal.SIGTERM)
    result = pipe.end(waiting, limit=60)
    assert result.code == 75, result
    assert recorded(pipe)
    assert "stopped by SIGTERM\n  continue with: pipe resume" in result.stderr
    assert "report" not in result.stderr
    assert not list(pipe.run_dir.glob("report.html*"))


@pytest.mark.parametrize(
    ("fault", "number", "end", "code"),
    [
        ("raise", signal.SIGTERM, "run failed", 1),
        ("none", signal.SIGINT, "run finished", 0),
        pytest.param("raise", signal.SIGINT, "run failed", 1, marks=pytest.mark.full),
        pytest.param("none", signal.SIGTERM, "run finished", 0, marks=pytest.mark.full),
    ],
)
def test_a_signal_during_the_report_does_not_change_the_end(
    pipe: Pipe, tmp_path: Path, fault: str, number: int, end: str, code: int
) -> None:
    run = started(pipe, tmp_path, fault)
    pipe.wait_for(lambda: recorded(pipe, end))
    run.send_signal(number)
    result = pipe.end(run, limit=60)
    assert result.code == code, result
    assert f"could not be written: {signal.Signals(number).name} (later: " in result.stderr
    assert ("error: rank 0 failed in slot `train`: ValueError: boom" in result.stderr) == code
    assert pipe.events()[-1]["event"] == end
