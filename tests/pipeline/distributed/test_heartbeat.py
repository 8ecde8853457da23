"""Signs of life in memory that a launcher reads, and ranks that give none."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from pipeline.distributed import heartbeat
from pipeline.distributed.heartbeat import FIELDS, Phase, Watchdog, heartbeats
from pipeline.distributed.settings import Timeouts
from pipeline.utils.files import memory_file


def memory(ranks: int) -> int:
    return memory_file("heartbeats", ranks * FIELDS * 8)


def test_a_rank_writes_where_its_launcher_reads() -> None:
    shared = memory(3)
    ranks, own = heartbeats(shared), heartbeats(shared)[2]
    own.beat(Phase.STEP, step=7)
    with own.waiting():
        assert ranks[2].read().waits
    own.landmark()
    beat = ranks[2].read()
    assert (beat.phase, beat.step, beat.waits, beat.landmarks) == (Phase.STEP, 7, False, 1)
    assert beat.time > 0
    assert ranks[1].read().time == 0


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 50.0
        monkeypatch.setattr(heartbeat.time, "monotonic", lambda: self.now)

    def look(self, found: Watchdog, seconds: float) -> list[str]:
        """Look once a second for so long; return what was found last."""
        said: list[str] = []
        for _ in range(round(seconds)):
            self.now += 1
            said = [f"{stall.number} {stall.describe()}" for stall in found.stalled()]
        return said


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_ranks_over_their_time(clock: Clock) -> None:
    ranks = heartbeats(memory(3))
    for rank in ranks:
        rank.beat(Phase.STEP, step=4)
    found = Watchdog(ranks, [os.getpid()] * 3, Timeouts(step=10, save=30, load=60))
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
    found = Watchdog(heartbeats(memory(1)), [os.getpid()], Timeouts(load=10))
    clock.look(found, 5)
    clock.now += 1000
    assert clock.look(found, 8) == []
    assert clock.look(found, 4) == ["0 has given no sign of life for 11 s"]


def test_a_process_that_is_stopped(clock: Clock) -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        found = Watchdog(heartbeats(memory(1)), [process.pid], Timeouts())
        process.send_signal(signal.SIGSTOP)
        while not heartbeat._is_stopped(process.pid):
            time.sleep(0.01)
        assert clock.look(found, 20) == []
        assert clock.look(found, 3) == [
            "0 has given no sign of life for 23 s: something has stopped its process (SIGSTOP)"
        ]
    finally:
        process.kill()
        process.wait()
