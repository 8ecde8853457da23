"""Signs of life, their absence, and what decides about another start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeline.distributed.heartbeat import HEARTBEATS, Heartbeats, Phase, own_heartbeat
from pipeline.errors import RunFailed
from pipeline.launch import local, watch
from pipeline.launch.restarts import Attempts
from pipeline.launch.watch import Watch, landmarks
from pipeline.recipe.launch import Restarts, Timeouts


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 50.0
        monkeypatch.setattr(watch.time, "monotonic", lambda: self.now)

    def look(self, found: Watch, seconds: float) -> list[str]:
        """Look once a second for so long; return what was found last."""
        said: list[str] = []
        for _ in range(round(seconds)):
            self.now += 1
            said = [f"{stall.number} {stall.describe()}" for stall in found.stalled()]
        return said


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_rank_writes_where_its_launcher_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Heartbeats(3)
    monkeypatch.setenv(HEARTBEATS, f"/proc/self/fd/{shared.descriptor}")
    monkeypatch.setenv("LOCAL_RANK", "2")
    own = own_heartbeat()
    own.beat(Phase.STEP, step=7)
    with own.waiting():
        assert shared.read(2).waits
    own.landmark()
    beat = shared.read(2)
    assert (beat.phase, beat.step, beat.waits, beat.landmarks) == (Phase.STEP, 7, False, 1)
    assert beat.time > 0
    assert shared.read(1).time == 0
    assert landmarks(shared, 3) == 1


def test_ranks_over_their_time(clock: Clock) -> None:
    shared = Heartbeats(3)
    ranks = [shared.writer(number) for number in range(3)]
    for rank in ranks:
        rank.beat(Phase.STEP, step=4)
    found = Watch(shared, [os.getpid()] * 3, Timeouts(step=10, save=30, load=60))
    assert clock.look(found, 10) == []
    ranks[0].beat()
    assert clock.look(found, 2) == [
        "1 has given no sign of life for 12 s in step 4",
        "2 has given no sign of life for 12 s in step 4",
    ]
    ranks[1].beat(Phase.SAVE)
    with ranks[2].waiting():  # for the others, however long
        assert clock.look(found, 25) == ["0 has given no sign of life for 26 s in step 4"]
        assert clock.look(found, 7) == [
            "0 has given no sign of life for 33 s in step 4",
            "1 has given no sign of life for 31 s while saving at step 4",
        ]


def test_a_launcher_that_was_suspended_blames_nobody(clock: Clock) -> None:
    shared = Heartbeats(1)
    found = Watch(shared, [os.getpid()], Timeouts(load=10))
    clock.look(found, 5)
    clock.now += 1000
    assert clock.look(found, 8) == []
    assert clock.look(found, 4) == ["0 has given no sign of life for 11 s"]


def test_a_process_that_is_stopped(clock: Clock) -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        found = Watch(Heartbeats(1), [process.pid], Timeouts())
        process.send_signal(signal.SIGSTOP)
        while watch._state(process.pid) != "T":
            time.sleep(0.01)
        assert clock.look(found, 20) == []
        assert clock.look(found, 3) == [
            "0 has given no sign of life for 23 s: something has stopped its process (SIGSTOP)"
        ]
    finally:
        process.kill()
        process.wait()


def test_waits_grow_and_end() -> None:
    attempts = Attempts(Restarts(limit=3, backoff=2, max_backoff=5))
    died = RunFailed("x", restart="always")
    assert [attempts.wait_after(died, progressed=False) for _ in range(4)] == [2, 4, 5, None]
    assert attempts.wait_after(died, progressed=True) == 2
    assert attempts.number == 1


@pytest.mark.parametrize(
    ("restart", "progressed", "goes_on"),
    [("never", True, False), ("after progress", False, False), ("after progress", True, True)],
)
def test_what_another_start_may_help(restart: str, progressed: bool, goes_on: bool) -> None:
    error = RunFailed("x", restart=restart)  # type: ignore[arg-type]
    wait = Attempts(Restarts()).wait_after(error, progressed=progressed)
    assert (wait is not None) is goes_on


def test_restarts_can_be_off() -> None:
    error = RunFailed("x", restart="always")
    assert Attempts(Restarts(limit=0)).wait_after(error, progressed=True) is None


def test_the_flight_recorder_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = watch.recorder_environment(tmp_path)
    pipe = Path(variables["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "1.pipe")
    os.mkfifo(pipe)
    heard = []
    listener = threading.Thread(target=lambda: heard.append(pipe.read_bytes()))
    listener.start()
    deadline = time.monotonic() + 10
    while listener.is_alive() and time.monotonic() < deadline:
        watch.request_collectives(tmp_path, [0, 1])  # rank 0 has no recorder
        time.sleep(0.05)
    listener.join(1)
    assert heard == [b"1"]
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "5")
    assert watch.recorder_environment(tmp_path) == {}


def test_the_allocators_segments_grow_unless_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in local.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    assert local.allocator_settings() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    assert local.allocator_settings() == {}


SELF = """
import sys, time
from pathlib import Path
from pipeline.distributed.heartbeat import Phase
from pipeline.distributed.process_group import DistContext
from pipeline.recipe.launch import Timeouts
from pipeline.execution.worker import watched
dist = DistContext(rank=5, device=None)
heartbeat = dist.heartbeat
heartbeat.beat(Phase.STEP, step=3)
with watched(Path(sys.argv[1]), dist, Timeouts(step=1.5)):
    for _ in range(30):
        time.sleep(0.1)
        heartbeat.beat()
    print("alive", flush=True)
    time.sleep(60)
"""


def test_a_rank_that_nobody_watches_watches_itself(tmp_path: Path) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", SELF, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "alive\n")
    assert time.monotonic() - began < 30
    report = (tmp_path / "failures" / "rank-00005.json").read_text()
    assert "this rank has given no sign of life for" in report
    assert "in step 3" in report
    assert 'File "<string>", line 16' in (tmp_path / "logs" / "rank-00005.log").read_text()


STOPPED = """
import os, signal, sys, time
from pathlib import Path
from pipeline.distributed.process_group import DistContext
from pipeline.recipe.launch import Timeouts
from pipeline.execution import worker
worker.STOP_SECONDS = 2.0
dist = DistContext(rank=5, device=None)
with worker.watched(Path(sys.argv[1]), dist, Timeouts()), dist.stop.deferred():
    with dist.heartbeat.waiting():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
"""


def test_a_rank_that_is_asked_to_stop_does_not_wait_for_the_dead(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", STOPPED, str(tmp_path)], check=False, timeout=40)
    assert done.returncode == 1
    report = (tmp_path / "failures" / "rank-00005.json").read_text()
    assert "this rank was asked to stop, and the others do not come" in report
