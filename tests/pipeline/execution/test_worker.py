"""A rank that watches itself."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

SELF = """
import sys, time
from pathlib import Path
from pipeline.distributed.heartbeat import Phase
from pipeline.distributed.process_group import DistContext
from pipeline.distributed.launch import Timeouts
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
from pipeline.distributed.launch import Timeouts
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
