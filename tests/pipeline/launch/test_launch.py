"""Signals, children, threads, and recipes that cannot be started here."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.chain.plan import make_plan
from pipeline.chain.registry import Registry
from pipeline.distributed.environment import Shared, rank_environment
from pipeline.distributed.launch import LaunchInfo
from pipeline.distributed.signals import ENDING, Interrupted, default_signals, interruptible
from pipeline.errors import RecipeError, RunFailed
from pipeline.execution import failures
from pipeline.execution.journal import Journal
from pipeline.execution.run_spec import RunSpec
from pipeline.launch.local import restarted, run_ranks, set_threads
from pipeline.launch.ranks import LocalRanks
from pipeline.recipe import Launch, load_recipe
from pipeline.utils.processes import GRACE, kill_descendants, module_command, start_child
from pipeline.view.screen import Screen

STUCK = """
import ctypes, os, signal, threading
from pipeline.distributed.signals import interruptible
with interruptible(force_after=0.3):
    print("ready", flush=True)
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)  # never returns, whatever signal comes
"""


@pytest.mark.parametrize("number", ENDING)
def test_an_ending_signal_raises_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    seen = []
    with interruptible(force_after=60):
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        except Interrupted as interrupted:
            seen.append(interrupted.number)
        os.kill(os.getpid(), signal.SIGTERM)  # ignored during the shutdown
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert seen == [number]
    assert signal.getsignal(number) == before


def test_a_failure_that_restarts_names_no_command_and_keeps_its_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan: Any = SimpleNamespace(view=SimpleNamespace(procs=2, device="cpu"))
    failures.record(tmp_path, 1, "train", ValueError("boom"))
    problem = str(failures.first(tmp_path, []))
    assert problem.splitlines()[-1] == failures.continuation(tmp_path)
    restarted(tmp_path, plan, problem, 1, 5.0)
    failed, started = Journal(tmp_path / "journal.jsonl").events()
    assert (failed["event"], failed["restarting"]) == ("run failed", True)
    assert failed["problem"].startswith("rank 1 failed in slot `train`: ValueError: boom\n")
    assert started["restart"] == 1
    assert "starting again in 5 s (restart 1)" in capsys.readouterr().err
    assert "pipe resume" not in failed["problem"]
    assert failures.first_rank(tmp_path) is None
    assert (tmp_path / "failures" / "rank-00001.txt").read_text().endswith("ValueError: boom\n")


def test_a_process_stuck_in_a_native_call_ends_all_the_same() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.3)  # until it is in the call
    process.terminate()
    code = process.wait(10)
    process.stdout.close()
    assert code == 143


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible(force_after=60):
            os.kill(os.getpid(), signal.SIGHUP)
        default_signals()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_rank_whose_launcher_is_dead_already_ends(tmp_path: Path) -> None:
    shared = Shared(launcher=1, heartbeats=0, failures=0, stacks=0, store=None)
    message = {"spec": spec(tmp_path).dump(), "shared": dataclasses.asdict(shared)}
    process = start_child("pipeline.execution.worker", message, str(tmp_path))
    assert process.wait() == 1
    assert list(tmp_path.iterdir()) == []


def spec(run_dir: Path) -> RunSpec:
    return RunSpec(run_dir=str(run_dir), recipe={"name": "x", "stages": {}}, last="")


WORKER = """
import json, os, random, signal, sys, time
from pathlib import Path

run, rank = Path(sys.argv[2]), int(os.environ["RANK"])
fault = (run / "fault").read_text()
shared = json.loads(os.pread(int(sys.argv[1]), 1 << 20, 0))["shared"]
with open(f"/proc/self/fd/{shared['store']}", "r+") as store:  # all have the same, and can open it
    pass
if rank == 1 and fault == "leave":
    os._exit(0)
if rank == 1 and fault in ("killed", "terminated"):
    os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGTERM)
if rank == 0 and fault == "late":  # it notices before its peer is gone
    while not (run / "ready").exists():
        time.sleep(0.01)
    sys.exit(1)
if rank == 1 and fault == "late":
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGSEGV))
    (run / "ready").touch()
if fault != "none":
    time.sleep(60)
os._exit(76)
"""
"""Program that stands for a rank and imports nothing."""


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return two misbehaving ranks, as the launcher starts them."""
    path = tmp_path / "path"
    path.mkdir()
    (path / "misbehaving.py").write_text(WORKER)
    (tmp_path / "random.py").write_text("raise SystemExit(9)")  # in the user's folder
    monkeypatch.setenv("PYTHONPATH", str(path))
    monkeypatch.setattr(
        "pipeline.utils.processes.module_command",
        lambda _, *rest: module_command("misbehaving", *rest),
    )
    monkeypatch.chdir(tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    def start(fault: str) -> None:
        (tmp_path / "fault").write_text(fault)
        ranks = LocalRanks([rank_environment(rank, 2) for rank in range(2)])
        with kill_descendants(), ranks:
            run_ranks(ranks, Launch(), spec(tmp_path), Screen())
        assert not list(scratch.iterdir())

    return start


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("leave", "rank 1 ended by itself with exit code 0"),
        ("killed", "rank 1 was killed by SIGKILL (the system does this when memory runs out)"),
        ("late", "rank 0 ended by itself with exit code 1"),
    ],
)
def test_the_rank_that_ended_first_ends_the_run(
    ranks: Callable[[str], None], fault: str, words: str
) -> None:
    began = time.monotonic()
    with pytest.raises(RunFailed) as caught:
        ranks(fault)
    assert str(caught.value).startswith(f"{words} before the first slot\n")
    assert time.monotonic() - began < 30


def test_a_signal_to_one_rank_stops_all(ranks: Callable[[str], None]) -> None:
    with pytest.raises(Interrupted) as caught:
        ranks("terminated")
    assert caught.value.number == signal.SIGTERM


def test_a_rank_that_was_dying_already_is_the_cause(
    ranks: Callable[[str], None], tmp_path: Path
) -> None:
    failures.record(tmp_path, 0, "train", RuntimeError("connection closed by peer"))
    with pytest.raises(RunFailed, match="rank 1 was killed by SIGSEGV"):
        ranks("late")


def test_a_rank_that_died_before_the_others_are_stopped_is_named() -> None:
    """A rank can die between the check of all ranks and the end of the others."""
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    process.kill()
    process.wait()
    with LocalRanks([rank_environment(0, 1)]) as ranks:
        ranks.processes.append(process)
        assert ranks.stop() == [failures.Exit(rank=0, code=-signal.SIGKILL)]


def test_files_of_the_user_stand_in_for_no_module_of_a_rank(ranks: Callable[[str], None]) -> None:
    ranks("none")


def test_what_is_forked_ends_alone() -> None:
    """A pool ends its processes by SIGTERM when it has lost one; the parent must not end."""
    reader, writer = os.pipe()
    with interruptible(force_after=0.1):
        child = os.fork()
        if not child:
            os.write(writer, b"!")
            time.sleep(30)
            os._exit(0)
        os.read(reader, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        time.sleep(0.3)  # this process would have ended


def test_a_signal_that_a_stage_handles_ends_nothing() -> None:
    seen = []
    with interruptible(force_after=0.1):
        signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.3)
    assert seen == [signal.SIGUSR1]


def test_no_descendant_is_left(tmp_path: Path) -> None:
    """A process in its own session starts another and dies."""
    file = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {file}; wait"
    with kill_descendants():
        process = subprocess.Popen(["bash", "-c", script], start_new_session=True)
        while not (file.exists() and file.read_text().endswith("\n")):
            time.sleep(0.01)
        process.kill()
        process.wait()
        pid = int(file.read_text())
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_descendant_with_grace_gets_its_time(tmp_path: Path) -> None:
    """A process in its own session starts another and dies."""
    looks: list[float] = []
    for seconds, takes, expected in ((60, 5, "begun\nended\n"), (5, 60, "begun\n")):
        file = tmp_path / f"{seconds}"
        script = f"echo begun; sleep {takes}; echo ended"
        work = f"bash -c '{script}' x {GRACE}{seconds} > {file} & wait"
        looks.clear()
        with kill_descendants(lambda: looks.append(time.monotonic())):
            process = subprocess.Popen(["bash", "-c", work], start_new_session=True)
            while not (file.exists() and file.read_text()):
                time.sleep(0.01)
            process.kill()
            process.wait()
        assert file.read_text() == expected
        assert looks


@pytest.mark.parametrize(
    ("asked", "set_before", "expected"), [(None, None, 3), (None, "7", 7), (2, "7", 2)]
)
def test_threads(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, set_before: str | None, expected: int
) -> None:
    monkeypatch.setattr("pipeline.hardware.host.usable_cores", lambda: 7.5)
    monkeypatch.setenv("OMP_NUM_THREADS", set_before or "")
    if set_before is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    set_threads(Launch(threads=asked), 2)
    assert os.environ["OMP_NUM_THREADS"] == str(expected)


@pytest.mark.parametrize(
    ("launch", "started", "key", "words"),
    [
        (
            "device: cuda, procs: 16", LaunchInfo(), "procs",
            "16 processes on each node, but this machine has 8 GPUs (set launch.procs=8 and "
            "launch.nodes, or null to take as many as there are)",
        ),
        (
            "device: cpu, procs: 2", LaunchInfo(procs=1), "procs",
            "2 processes, but the launcher started 1 (set launch.procs=1, or null to take as many "
            "as are started)",
        ),
        (
            "device: cpu, procs: 2, nodes: 2", LaunchInfo(procs=6, per_node=3), "procs",
            "2 processes on each node, but the launcher started 3 (set launch.procs=3, or null to "
            "take as many as are started)",
        ),
        (
            "device: cpu, procs: 2, nodes: 2", LaunchInfo(procs=6, per_node=2), "nodes",
            "2 nodes, but 3 nodes were started (set launch.nodes=3, or null to take as many as "
            "there are)",
        ),
        (
            "device: cpu, nodes: {min: 2, max: 4}", LaunchInfo(nodes=5), "nodes",
            "2 to 4 nodes, but 5 nodes were started (set launch.nodes=5, or null to take as many "
            "as there are)",
        ),
        (
            "device: cpu, nodes: 8", LaunchInfo(), "nodes",
            "8 nodes, but this is one (on every node: pipe run RECIPE --nodes NODES --node-rank "
            "NUMBER --rdzv HOST:PORT, or have `pipe launch` write a script; or set launch.nodes=1)",
        ),
    ],
)  # fmt: skip
def test_what_was_started_and_the_recipe_agree(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launch: str,
    started: LaunchInfo,
    key: str,
    words: str,
) -> None:
    monkeypatch.setattr("pipeline.chain.plan.gpu_count", lambda: 8)
    path = tmp_path / "recipe.yaml"
    path.write_text(f"name: x\nlaunch: {{{launch}}}\nstages: {{}}\n")
    with pytest.raises(RecipeError) as caught:
        make_plan(load_recipe(path), registry=Registry([]), for_this_machine=True, started=started)
    problem = next(p for p in caught.value.problems if p.key == f"launch.{key}")
    assert str(problem).endswith(f": launch.{key}: {words}")


@pytest.mark.parametrize(
    "started",
    [
        LaunchInfo(procs=16, per_node=8),
        LaunchInfo(nodes=2),
        LaunchInfo(procs=16),
        LaunchInfo(procs=8, nodes=1),
    ],
)
def test_what_was_started_as_the_recipe_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: LaunchInfo
) -> None:
    monkeypatch.setattr("pipeline.chain.plan.gpu_count", lambda: 8)
    path = tmp_path / "recipe.yaml"
    path.write_text("name: x\nlaunch: {procs: 8, nodes: {min: 1, max: 2}}\nstages: {}\n")
    with pytest.raises(RecipeError) as caught:
        make_plan(load_recipe(path), registry=Registry([]), for_this_machine=True, started=started)
    assert [problem.key for problem in caught.value.problems] == ["stages"]
