"""Processes of ranks, and the collectives of ranks that stand still."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from pipeline.distributed.environment import Shared, rank_environment
from pipeline.execution import failures
from pipeline.execution.run_spec import RunSpec
from pipeline.launch.ranks import LocalRanks, recorder_environment, request_collectives
from pipeline.utils.processes import start_child


def test_a_rank_whose_launcher_is_dead_already_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = RunSpec(run_dir=str(tmp_path), recipe={"name": "x", "stages": {}})
    shared = dataclasses.asdict(Shared(heartbeats=0, failures=0, stacks=0, store=None))
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
