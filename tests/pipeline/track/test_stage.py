"""The process that feeds a tracker: nothing but the run's end ends it, it says how it ends, and
nobody waits for it longer than it was given; and trackers that fail next to a real run."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.contracts.metrics import records
from pipeline.distributed.signals import Interrupted
from pipeline.execution.run_spec import RunSpec
from pipeline.testing import context
from pipeline.track.feeder import Feeder
from pipeline.track.stage import RunningFeeder, Tracker, TrackerStage
from pipeline.utils.files import private_folder
from pipeline.utils.processes import kill_sessions
from tests.pipeline.track.test_feeder import Noted
from tests.pipeline.view.folders import made, step
from tests.support.pipe import Outcome, Pipe
from tests.support.plugins import install
from tests.support.tiny_project import tiny_project
from tests.support.waiting import becomes

HANGING = {"use": "track.failing", "at": "log", "hangs": True}
LONG = 60.0
"""Seconds that a feeder may take on a busy machine, and a hanging one is to take."""

Start = Callable[[Mapping[str, Any], float], RunningFeeder]


def plugin(folder: Path) -> Path:
    """Return a folder with a distribution of trackers that fail."""
    (folder / "plugin").mkdir()
    source = Path(__file__).with_name("failing_trackers.py").read_text("utf-8")
    points = {"track.failing": "TrackFailing"}
    install(folder / "plugin", "failing-trackers", "failing_trackers", source, points)
    return folder / "plugin"


@dataclass(frozen=True, kw_only=True)
class Named(TrackerStage):
    """The stage that a start reads: its tracker is made in the process, from the recipe."""

    own: str = ""

    def tracker(self) -> Tracker:
        raise AssertionError

    def unsent(self, folder: Path) -> str:
        return self.own and f"{self.own} {folder.name}"


CLASSES = {
    "track.failing": "failing_trackers:TrackFailing",
    "track.sqlite": "stages.track:TrackSqlite",
    "track.unknown": "unknown_trackers:TrackUnknown",
}


def spec_of(recipe: Mapping[str, Any], folder: Path) -> RunSpec:
    """Return the run of a recipe with a tracker, of a class that this process cannot import."""
    use = recipe["stages"]["track"]["use"]
    facts = {"use": use, "inputs": {}, "digest": "", "training": "", "unread": []}
    slot = {"slot": "track", **facts, "kind": CLASSES[use], "gives": None}
    return RunSpec(run_dir=str(folder), recipe=recipe, slots=(slot,))


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a start of the feeder of a tracker, with seconds for its end, in a run of a step."""
    monkeypatch.setenv("PYTHONPATH", str(plugin(tmp_path)), prepend=os.pathsep)
    monkeypatch.setattr("pipeline.track.stage._running", [])
    begun: list[RunningFeeder] = []

    def begin(tracker: Mapping[str, Any], timeout: float) -> RunningFeeder:
        recipe = {"name": "r", "stages": {"track": tracker}}
        folder = made(tmp_path / "run", (), [step(1)], recipe)
        ctx = context(folder)
        ctx.slot = "track"
        ctx.spec = spec_of(recipe, folder).dump()
        ctx.on_exit = lambda end: begun.append(end.__self__)
        Named(timeout=timeout).run(ctx)
        return begun[-1]

    yield begin
    kill_sessions([feeder.process for feeder in begun])
    for feeder in begun:
        assert feeder.process.stdin is not None
        feeder.process.stdin.close()
        feeder._listener.join()


@pytest.fixture
def working(tmp_path: Path) -> dict[str, Any]:
    """Return the slot of a tracker that works."""
    return {"use": "track.sqlite", "file": str(tmp_path / "runs.sqlite")}


def sent(working: Mapping[str, Any]) -> tuple[str, int]:
    """Return the outcome that the tracker was told, and how many losses."""
    with contextlib.closing(sqlite3.connect(working["file"])) as file:
        ((outcome,),) = file.execute("select outcome from runs").fetchall()
        ((losses,),) = file.execute("select count(*) from metrics where name = 'loss'").fetchall()
    return outcome, losses


def has_open(process: int, file: Path) -> bool:
    """Whether a process has a file open."""
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            if descriptor.samefile(file):
                return True
    return False


def is_open(feeder: RunningFeeder) -> bool:
    """Wait until the tracker has begun."""
    return becomes((feeder.ctx.run_dir / "trackers/track.json").exists, LONG)


def test_signals_do_not_end_it(
    start: Start, working: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    feeder = start(working, LONG)
    for number in (signal.SIGTERM, signal.SIGHUP):
        feeder.process.send_signal(number)  # before Python has started
    assert is_open(feeder)
    assert os.getsid(feeder.process.pid) == feeder.process.pid
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        feeder.process.send_signal(number)
    feeder.end()
    assert sent(working) == ("finished", 1)
    assert caplog.messages == []


def test_one_that_is_killed_is_reported_at_once(
    start: Start, working: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    feeder = start(working, LONG)
    assert is_open(feeder)
    feeder.process.kill()
    assert becomes(lambda: caplog.messages)
    rest = f"the rest is sent by `pipe track {feeder.ctx.run_dir}`"
    assert caplog.messages == [f"track: tracking has ended (SIGKILL); {rest}"]


def test_it_outlives_rank_0_by_its_seconds(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    feeder = start(HANGING, 0.5)
    assert is_open(feeder)
    assert feeder.process.stdin is not None
    feeder.process.stdin.close()  # as if rank 0 had died
    assert feeder.process.wait(LONG) == -signal.SIGALRM
    assert becomes(lambda: caplog.messages)
    (line,) = caplog.messages
    assert line.startswith("track: not everything was sent in 0.5 s; ")


def test_a_failure_is_sent(start: Start, working: dict[str, Any]) -> None:
    feeder = start(working, LONG)
    _fail(feeder)
    assert feeder.process.wait(LONG) == 0
    assert sent(working) == ("failed", 1)


def test_a_failed_rank_does_not_wait(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    feeder = start(HANGING, LONG)
    began = time.monotonic()
    _fail(feeder)
    assert time.monotonic() - began < LONG / 4
    assert caplog.messages[-1] == "track: the rest is being sent, for at most 60 s"


def _fail(feeder: RunningFeeder) -> None:
    try:
        raise RuntimeError
    except RuntimeError:
        feeder.end()


def test_what_the_tracker_keeps_has_a_command(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    feeder = start(HANGING, 0.5)
    feeder.stage = Named(timeout=0.5, own="theirs sync")
    assert is_open(feeder)
    feeder.end()
    rest = f"`pipe track {feeder.ctx.run_dir}` and `theirs sync run`"
    assert caplog.messages == [
        f"track: not everything was sent in 0.5 s; the rest is sent by {rest}"
    ]


def test_all_learn_of_the_end_at_once(start: Start, working: dict[str, Any]) -> None:
    first, second = start(working, LONG), start(working, LONG)
    second.end()
    assert first.process.stdin is not None
    assert first.process.stdin.closed
    first.end()
    assert first.process.returncode == second.process.returncode == 0


def test_a_rank_that_a_launcher_stops_after_a_failure_has_failed(
    start: Start, working: dict[str, Any]
) -> None:
    feeder = start(working, LONG)
    assert is_open(feeder)
    report = {
        "rank": 1, "time": 1.0, "slot": "train", "message": "too bad", "expected": True,
        "refused": False, "memory": "", "restart": "never", "place": "",
    }  # fmt: skip
    (private_folder(feeder.ctx.run_dir / "failures") / "rank-1.json").write_text(json.dumps(report))
    try:
        raise Interrupted(signal.SIGTERM)
    except Interrupted:
        feeder.end()
    assert feeder.process.wait(LONG) == 0
    assert sent(working) == ("failed", 1)


def test_it_waits_for_the_one_of_an_earlier_start(start: Start, tmp_path: Path) -> None:
    lock = tmp_path / "run/trackers/track.lock"
    with Feeder(made(tmp_path / "run"), "track", 1, Noted()).alone():
        feeder = start({"use": "track.failing", "at": "open"}, 0.5)
        assert becomes(lambda: has_open(feeder.process.pid, lock), LONG)
        feeder.end()
        assert feeder.process.returncode == -signal.SIGALRM  # or it would have failed
    assert not (tmp_path / "run/trackers/track.txt").exists()


def test_a_stage_that_this_machine_lacks_is_in_a_file(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    feeder = start({"use": "track.unknown"}, LONG)
    assert feeder.process.wait(LONG) == 1
    assert becomes(lambda: caplog.messages)
    file = feeder.ctx.run_dir / "trackers/track.txt"
    (line,) = caplog.messages
    assert line.startswith("track: tracking has ended: ")
    assert f"(more in {file}); `pipe track " in line
    assert "stage `track.unknown` cannot be loaded" in file.read_text()


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
    slots = {slot: {"use": "track.failing", **fields} for slot, fields in TRACKERS.items()}
    tiny_project(folder, works={"use": "track.sqlite", "file": "./runs.sqlite"}, **slots)
    return Pipe(plugin(folder), folder)


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
