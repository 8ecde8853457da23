"""Ranks on this machine: how they end, how the run is started again, and the collectives of ranks
that stand still."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.distributed.environment import Shared, rank_environment
from pipeline.distributed.signals import Interrupted
from pipeline.errors import RunFailed
from pipeline.execution import failures
from pipeline.execution.journal import Journal
from pipeline.execution.rank_logging import ACTIVITY_FILE
from pipeline.execution.run_spec import RunSpec
from pipeline.launch.ranks import (
    ALLOCATOR,
    LocalRanks,
    for_gpus,
    recorder_environment,
    request_collectives,
    restarted,
    run_ranks,
    set_threads,
)
from pipeline.recipe import Launch
from pipeline.utils.processes import kill_descendants, module_command, start_child
from pipeline.view.screen import Screen


def test_a_rank_whose_launcher_is_dead_already_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = RunSpec(run_dir=str(tmp_path), recipe={"name": "x", "stages": {}})
    shared = dataclasses.asdict(Shared(heartbeats=0, number=0, failures=0, stacks=0, store=None))
    monkeypatch.setattr(os, "getpid", lambda: 1)
    message = {"spec": spec.dump(), "shared": shared, "hidden": []}
    process = start_child("pipeline.execution.worker", message, str(tmp_path))
    assert process.wait() == 1
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_died_before_the_others_are_stopped_is_named() -> None:
    """A rank can die between the check of all ranks and the end of the others."""
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    process.kill()
    process.wait()
    with LocalRanks([rank_environment(0, 1)]) as ranks:
        ranks.processes.append(process)
        assert ranks.stop() == [failures.Exit(rank=0, code=-signal.SIGKILL)]


def test_the_flight_recorder_is_asked(tmp_path: Path) -> None:
    variables = recorder_environment(tmp_path)
    pipe = Path(variables["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "1.pipe")
    os.mkfifo(pipe)
    heard: list[bytes] = []
    listener = threading.Thread(target=lambda: heard.append(pipe.read_bytes()))
    listener.start()
    deadline = time.monotonic() + 10
    while listener.is_alive() and time.monotonic() < deadline:
        request_collectives(tmp_path, [0, 1])  # rank 0 has no recorder
        time.sleep(0.05)
    listener.join(1)
    assert heard == [b"1"]


WORKER = """
import json, os, random, signal, sys, time
from pathlib import Path

run, rank = Path(sys.argv[2]), int(os.environ["RANK"])
fault = (run / "fault").read_text()
shared = json.loads(os.pread(int(sys.argv[1]), 1 << 20, 0))["message"]["shared"]
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
    spec = RunSpec(run_dir=str(tmp_path), recipe={"name": "x", "stages": {}})

    def start(fault: str) -> None:
        (tmp_path / "fault").write_text(fault)
        ranks = LocalRanks([rank_environment(rank, 2) for rank in range(2)])
        with kill_descendants(), ranks:
            run_ranks(ranks, Launch(), spec, Screen())
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


def test_files_of_the_user_stand_in_for_no_module_of_a_rank(ranks: Callable[[str], None]) -> None:
    ranks("none")


def test_a_failure_that_restarts_names_no_command_and_keeps_its_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan: Any = SimpleNamespace(view=SimpleNamespace(procs=2, device="cpu"))
    failures.record(tmp_path, 1, "train", ValueError("boom"))
    problem = str(failures.first(tmp_path, []))
    assert problem.splitlines()[-1] == failures.continuation(tmp_path)
    (tmp_path / ACTIVITY_FILE).write_text("{}")  # of a rank that was killed at work
    restarted(tmp_path, plan, problem, 1, 5.0)
    assert not (tmp_path / ACTIVITY_FILE).exists()
    failed, started = Journal(tmp_path / "journal.jsonl").events()
    assert (failed["event"], failed["restarting"]) == ("run failed", True)
    assert failed["problem"].startswith("rank 1 failed in slot `train`: ValueError: boom\n")
    assert started["restart"] == 1
    assert "starting again in 5 s (restart 1)" in capsys.readouterr().err
    assert "pipe resume" not in failed["problem"]
    assert failures.first_rank(tmp_path) is None
    assert (tmp_path / "failures" / "rank-00001.txt").read_text().endswith("ValueError: boom\n")


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


def test_variables_of_gpus_are_what_the_user_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    wanted = for_gpus(tmp_path)
    assert wanted["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert wanted["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "5")
    assert for_gpus(tmp_path) == {}
