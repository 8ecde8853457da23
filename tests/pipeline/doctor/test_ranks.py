"""Measuring processes that hang, fail or are left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.doctor.ranks import measure

MEASUREMENTS = """
import os, subprocess, sys, time

def rates(settings, record):
    print("noise of a library")
    threads = os.environ["OMP_NUM_THREADS"]
    record({"rank": int(os.environ["RANK"]), "threads": threads, "size": settings["size"]})

def meet(settings, record):
    from pipeline.doctor.measurements import Rendezvous
    rank, together = int(os.environ["RANK"]), Rendezvous(settings)
    for late in (0, 1):
        time.sleep(0.5 * (rank == late))
        record({"slowest": together.slowest(rank + 2.0 * late), "left": time.monotonic()})

def hang(settings, record):
    record({"pid": os.getpid()})
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                             start_new_session=True)
    record({"pid": child.pid})
    time.sleep(60)

def fail(settings, record):
    if os.environ["RANK"] == "1":
        print("before the end", flush=True)
        raise OSError(28, "No space left on device")
    time.sleep(60)

def die(settings, record):
    os.abort()
"""


@pytest.fixture(autouse=True)
def measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_measurements.py").write_text(MEASUREMENTS)
    path = [str(tmp_path), str(Path(__file__).parents[3])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


@pytest.mark.parametrize(("given", "threads"), [("5", "5"), ("", "3")])
def test_what_every_rank_tells(given: str, threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a number of threads, the ranks share the cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    if not given:
        monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("pipeline.hardware.host.usable_cores", lambda: 7.5)
    told = measure("own_measurements:rates", {"size": 1}, procs=2, seconds=30)
    assert told.failure == ""
    assert told.all_records == tuple({"rank": r, "threads": threads, "size": 1} for r in (0, 1))


def test_ranks_wait_for_the_last_and_leave_at_one_moment() -> None:
    told = measure("own_measurements:meet", {}, procs=2, seconds=60)
    assert told.failure == ""
    for here, there, longest in zip(*told.records, (1.0, 3.0), strict=True):
        assert (here["slowest"], there["slowest"]) == (longest, longest)
        assert abs(here["left"] - there["left"]) < 0.25


def test_a_measurement_that_hangs_is_given_up_with_all_it_started() -> None:
    began = time.monotonic()
    told = measure("own_measurements:hang", {}, procs=2, seconds=2)
    assert time.monotonic() - began < 20
    assert (told.failure, told.late) == ("given up after 2 s", True)
    pids = [record["pid"] for record in told.all_records]
    assert len(pids) == 4
    assert not any(map(psutil.pid_exists, pids))


def test_the_first_failure_ends_the_others() -> None:
    told = measure("own_measurements:fail", {}, procs=2, seconds=30)
    assert (told.failure, told.late) == ("No space left on device", False)
    assert told.printed == "before the end\nNo space left on device"
    assert measure("own_measurements:die", {}, procs=1, seconds=30).failure == (
        "its process was killed (SIGABRT)"
    )
    assert "no_such_module" in measure("no_such_module:f", {}, procs=1, seconds=30).failure


def test_no_process_outlives_a_killed_command(tmp_path: Path) -> None:
    program = (
        "from pipeline.doctor.ranks import measure\n"
        "measure('own_measurements:hang', {}, procs=1, seconds=60)\n"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment)
    deadline = time.monotonic() + 20
    while not list(tmp_path.glob("pipe-doctor-*/*.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.02)
    (rank,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert rank.wait(10) is None or not rank.is_running()
