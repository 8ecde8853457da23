"""The measurements themselves, tiny; and measuring processes that hang, fail or are left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import psutil
import pytest

from pipeline.doctor import measurements
from pipeline.doctor.measurements import bandwidth, measure


def test_bandwidths() -> None:
    """The definitions are nccl-tests', for 4 processes and 1 MB in 1 ms."""
    reduced = bandwidth("allreduce", 10**6, 1e-3, 4)
    assert (reduced.algbw, reduced.busbw) == pytest.approx((1e9, 1.5e9))
    gathered = bandwidth("allgather", 10**6, 1e-3, 4)
    assert (gathered.algbw, gathered.busbw) == pytest.approx((1e9, 0.75e9))


def test_the_disk(tmp_path: Path) -> None:
    records: list[dict[str, float]] = []
    settings = {"folder": str(tmp_path), "size": 1 << 20, "budget": 5}
    measurements.measure_disk(settings, records.append)
    assert [[*record] for record in records] == [
        ["disk_write_bytes_per_s"], ["disk_read_bytes_per_s"]
    ]  # fmt: skip
    assert all(rate > 0 for record in records for rate in record.values())
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_is_left_after_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part's fsync takes 3 s of a clock; the limit is 5 s for 1 GiB."""
    now = [0.0]
    written: list[int] = []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("os.fsync", lambda _: now.__setitem__(0, now[0] + 3))
    monkeypatch.setattr(measurements, "write_at", lambda _, offset, data: written.append(len(data)))
    done, seconds = measurements._write(0, memoryview(bytes(measurements.PIECE)), 1 << 30, 5)
    assert (done, seconds) == (2 * measurements.BETWEEN_SYNCS, 6)
    assert sum(written) == done


def test_copies_and_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(measurements, "SMALLEST", 32)
    monkeypatch.setattr(measurements, "LARGEST", 64)
    records: list[dict[str, float]] = []
    settings = {"device": "cpu", "store": str(tmp_path / "store"), "size": 1 << 16,
                "dtypes": ["fp32", "bf16"], "budget": 0.01}  # fmt: skip
    measurements.measure_copies(settings, records.append)
    measurements.measure_matmul(settings, records.append)
    assert [list(record) for record in records] == [["host_copy_bytes_per_s"], ["fp32"], ["bf16"]]
    assert all(rate > 0 for record in records for rate in record.values())


def test_repetitions_follow_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """An action takes 2 s here and 4 s on the slowest rank; the limit is 40 s, so all repeat it 10
    times."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def action() -> None:
        now[0] += 2

    seconds = measurements.seconds_each(
        action, device="cpu", budget=40, agree=lambda seconds: 2 * seconds
    )
    assert seconds == 4
    assert now[0] == 2 * (1 + 1 + 10)


@pytest.mark.parametrize("warning", ["", "The NVIDIA driver on your system is too old"])
def test_torch_without_gpus(warning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def available() -> bool:
        if warning:
            warnings.warn(f"{warning}\nmore", stacklevel=1)
        return False

    monkeypatch.setattr("torch.cuda.is_available", available)
    monkeypatch.setattr("torch.version.cuda", None)
    records: list[dict[str, object]] = []
    measurements.measure_torch({}, records.append)
    assert records == [
        {"driver": None, "uuids": []}, {"links": [], "numa_nodes": {}},
        {"cuda": None, "nccl": None, "problem": warning or None, "devices": []},
    ]  # fmt: skip


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
def own_measurements(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_measurements.py").write_text(MEASUREMENTS)
    path = [str(folder), str(Path(__file__).parents[3])]
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
    assert told.records == tuple(({"rank": r, "threads": threads, "size": 1},) for r in (0, 1))


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
    pids = [record["pid"] for rank in told.records for record in rank]
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
        "from pipeline.doctor.measurements import measure\n"
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
