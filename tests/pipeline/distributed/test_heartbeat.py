"""Signs of life in memory that a launcher reads."""

from __future__ import annotations

import pytest

from pipeline.distributed.environment import Shared
from pipeline.distributed.heartbeat import Heartbeats, Phase, own_heartbeat
from pipeline.launch.stalls import landmarks


def test_a_rank_writes_where_its_launcher_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Heartbeats(3)
    files = Shared(launcher=0, heartbeats=shared.descriptor, failures=-1, stacks=-1, store=None)
    monkeypatch.setattr("pipeline.distributed.heartbeat.shared", lambda: files)
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
