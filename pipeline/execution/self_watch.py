"""A rank that watches itself, where its launcher is another program that does not."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.distributed.heartbeat import HEARTBEATS
from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError
from pipeline.execution import failures
from pipeline.execution.rank_logging import open_log
from pipeline.recipe.launch import Timeouts

LOOK_SECONDS = 1.0
STOP_SECONDS = 20.0
"""Seconds that a rank which was asked to stop waits for others: one that has died never comes."""
SUSPENDED_SECONDS = 5.0
"""Seconds without a look after which this process itself must have been suspended."""


@contextlib.contextmanager
def watched(run_dir: Path, dist: DistContext, timeouts: Timeouts) -> Iterator[None]:
    """End this process with exit code 1 and its stacks in its log if the body gives no sign of life
    for longer than `timeouts` say, or was asked to stop and waits for ranks that do not come. Does
    nothing under `pipe`, which watches its ranks itself."""
    if HEARTBEATS in os.environ:
        yield
        return
    over = threading.Event()
    work = (run_dir, dist, timeouts, over)
    thread = threading.Thread(target=_watch, args=work, name="pipe-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watch(run_dir: Path, dist: DistContext, timeouts: Timeouts, over: threading.Event) -> None:
    beat, changed, looked, stopping = dist.heartbeat.read(), time.monotonic(), time.monotonic(), 0.0
    while not over.wait(LOOK_SECONDS):
        now, newest = time.monotonic(), dist.heartbeat.read()
        stopping = stopping + LOOK_SECONDS if newest.waits and dist.stop.asked else 0.0
        if stopping > STOP_SECONDS:
            _end(run_dir, dist.rank, "was asked to stop, and the others do not come")
        if newest != beat or newest.waits or now - looked > SUSPENDED_SECONDS:
            changed = now
        beat, looked = newest, now
        seconds = now - changed
        if seconds > getattr(timeouts, beat.phase.limit):
            _end(run_dir, dist.rank, f"has given no sign of life for {seconds:.0f} s{beat.where()}")


def _end(run_dir: Path, rank: int, problem: str) -> None:
    with contextlib.suppress(Exception):  # a disk that does not answer may be what it waits for
        failures.record(run_dir, rank, "", StageError(f"this rank {problem}"))
        with open_log(run_dir, rank) as log:
            faulthandler.dump_traceback(log)
    os._exit(1)
