"""Trackers that fail or hang beside a real run: it ends as well as without them, says so in a line
each, and goes on in the same run of a tracker that works."""

from __future__ import annotations

import json
import shlex
import sqlite3
from pathlib import Path

import pytest

from pipeline.contracts.metrics import records
from tests.support.pipe import Outcome, Pipe
from tests.support.plugins import install
from tests.support.tiny_project import tiny_project

TRACKERS = {
    "in_open": {"at": "open"},
    "in_log": {"at": "log"},
    "in_close": {"at": "close"},
    "hanging": {"at": "log", "hangs": True, "timeout": 1},
}
PATIENCE = 10.0
"""Seconds that trackers of which one hangs may keep a run at its end, on a busy machine."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Pipe:
    folder = tmp_path_factory.mktemp("project")
    source = Path(__file__).with_name("failing_trackers.py").read_text("utf-8")
    points = {"track.failing": "TrackFailing"}
    (folder / "plugin").mkdir()
    install(folder / "plugin", "failing-trackers", "failing_trackers", source, points)
    slots = {slot: {"use": "track.failing", **fields} for slot, fields in TRACKERS.items()}
    tiny_project(folder, works={"use": "track.sqlite", "file": "./runs.sqlite"}, **slots)
    return Pipe(folder / "plugin", folder)


@pytest.fixture(scope="module")
def run(project: Pipe) -> Outcome:
    """Return what a run says that ends behind its training of four steps."""
    options = ["--run-dir", "run", "--until", "train"]
    return project("run", "tiny.yaml", "train.steps=4", "train.generate=null", *options)


def test_each_is_a_line(run: Outcome, project: Pipe) -> None:
    assert run.code == 0, run.stderr
    said = (run.stdout + run.stderr).splitlines()
    for slot in ("in_open", "in_log", "in_close"):
        file = project.folder / f"run/trackers/{slot}.txt"
        (line,) = [line for line in said if line.startswith(f"{slot}: ") and "track.f" not in line]
        why = f"ConnectionError: no network in {slot.removeprefix('in_')}"
        rest = f"`pipe track {shlex.quote(str(file.parent.parent))}` sends the rest"
        assert line == f"{slot}: tracking has ended: {why} (more in {file}); {rest}"
        assert file.read_text().rstrip().endswith(f"{why}\nmore of it")
    (line,) = [line for line in said if line.startswith("hanging: not")]
    rest = f"the rest is sent by `pipe track {project.folder / 'run'}`"
    assert line == f"hanging: not everything was sent in 1 s; {rest}"


def test_training_is_not_stopped_or_delayed(run: Outcome, project: Pipe) -> None:
    found = list(records(project.folder / "run/metrics.jsonl"))
    assert [record["step"] for record in found if "loss" in record] == [1, 2, 3, 4]
    journal = (project.folder / "run/journal.jsonl").read_text().splitlines()
    times = {event.get("slot", event["event"]): event["time"] for event in map(json.loads, journal)}
    assert times["run stopped"] - times["train"] < PATIENCE


def test_a_resumed_run_goes_on_in_the_same_run(run: Outcome, project: Pipe) -> None:
    off = [f"{slot}=null" for slot in TRACKERS]
    done = project("resume", "run", "train.steps=6", *off, "--until", "train")
    assert done.code == 0, done.stderr
    found = sqlite3.connect(project.folder / "runs.sqlite")
    assert found.execute("select name, outcome from runs").fetchall() == [("run", "finished")]
    rows = found.execute("select step, value from metrics where name = 'loss' order by step")
    expected = [(r["step"], r["loss"]) for r in records(project.folder / "run/metrics.jsonl")
                if "loss" in r]  # fmt: skip
    assert rows.fetchall() == expected
    assert [step for step, _ in expected] == [1, 2, 3, 4, 5, 6]
    found.close()
    sent = project("track", "run")
    assert (sent.code, sent.stdout) == (0, "works: 0 steps sent\n")
