"""Examinations: a real but tiny one, and others whose measurements are invented."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner, Result

from pipeline.cli import main
from pipeline.doctor import examine as module
from pipeline.doctor.examine import QUICK, _load, _topology
from pipeline.doctor.inventory import folders
from pipeline.doctor.measurements import RankResults
from pipeline.doctor.report import Link, Topology, read_machine

H100 = {"name": "H100", "memory_bytes": 80 * 10**9, "compute_capability": "9.0"}
Measured = Callable[[str, int, float, Any], RankResults]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch) -> Callable[[Measured], None]:
    """Return a call that has measurements return what a function says, of name, processes, seconds
    and device."""

    def invent(answer: Measured) -> None:
        def measure(target: str, settings: Any, *, procs: int, seconds: float) -> RankResults:
            name = target.removeprefix("pipeline.doctor.measurements:measure_")
            return answer(name, procs, seconds, settings["device"])

        monkeypatch.setattr(module, "measure", measure)

    return invent


def test_a_whole_examination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = dataclasses.replace(
        QUICK,
        sizes=(1000, 1 << 12),
        seconds={"collectives": 0.01, "matmul": 0.01, "copies": 0.01, "disk": 1.0},
        copy_bytes=1 << 16,
        disk_bytes=1 << 20,
        total=120.0,
    )
    monkeypatch.setattr(module, "QUICK", tiny)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "runs").mkdir()
    done: dict[str, RankResults] = {}
    measure = module.measure

    def noted(target: str, *settings: Any, **limits: Any) -> RankResults:
        name = target.rpartition("_")[2]
        done[name] = measure(target, *settings, **limits)
        return done[name]

    monkeypatch.setattr(module, "measure", noted)
    before = signal.getsignal(signal.SIGTERM)
    result = doctor("--quick", "--procs", "2", "--json", "--out", "machine.json")
    assert result.exit_code == 0, result.stderr
    assert signal.getsignal(signal.SIGTERM) == before
    told = json.loads(result.stdout)
    assert json.loads(Path("machine.json").read_text()) == told
    assert told["schema_version"] == 1
    assert told["failures"] == []
    assert (told["procs"], told["device"], told["devices"]) == (2, "cpu", [])
    assert told["folders"][0]["path"] == str(tmp_path / "runs")
    for key in ("host_copy", "disk_write", "disk_read"):
        assert told[f"{key}_bytes_per_s"] > 0
    assert (told["h2d_bytes_per_s"], told["matmul_flops"]["fp16"]) == (None, None)
    assert told["matmul_flops"]["fp32"] > 0
    for name, factor in (("allreduce", 1), ("allgather", 2)):
        assert [each["bytes"] for each in told[name]] == [1000, 1 << 12]
        for each in told[name]:
            assert each["algbw"] == pytest.approx(each["bytes"] / each["seconds"])
            assert each["busbw"] == each["algbw"] / factor > 0
    for name in ("matmul", "copies"):  # all ranks report the slowest one's rate
        first, second = done[name].records
        assert first == second != ()
    assert done["collectives"].records[1] == ()
    machine = read_machine(Path("machine.json"))
    assert machine.allreduce[0].seconds == told["allreduce"][0]["seconds"]
    assert list((tmp_path / "runs").iterdir()) == []


def test_more_processes_than_gpus(invented: Callable[[Measured], None]) -> None:
    invented(lambda *_: RankResults(records=(({"cuda": "13.0", "devices": [H100]},),)))
    result = doctor("--procs", "2")
    assert result.exit_code == 2
    assert "error: --procs 2, but this machine has 1 GPU " in result.stderr


def test_gpus(tmp_path: Path, invented: Callable[[Measured], None]) -> None:
    """Requests to two GPUs, and the output."""
    answers: dict[str, list[dict[str, Any]]] = {
        "torch": [{"cuda": "13.0", "nccl": "2.28.3", "devices": [H100, H100]}],
        "disk": [{"disk_write_bytes_per_s": 2e9}, {"disk_read_bytes_per_s": 3e9}],
        "matmul": [{"fp32": 5e13}, {"bf16": 7e14}, {"fp16": 6e14}],
        "copies": [{"h2d_bytes_per_s": 5e10}, {"d2h_bytes_per_s": 4e10}],
        "collectives": [{"operation": "allreduce", "bytes": 1 << 26, "seconds": 5e-4}],
    }
    asked: dict[str, tuple[int, float, Any]] = {}

    def answer(name: str, procs: int, seconds: float, device: Any) -> RankResults:
        asked[name] = (procs, round(seconds), device)
        return RankResults(records=(tuple(answers[name]),))

    invented(answer)
    lines = doctor("--folder", str(tmp_path), "--out", "machine.json").stdout.splitlines()
    assert asked == {
        "torch": (1, 40, "cpu"),
        "disk": (1, 33, "cuda"),
        "matmul": (2, 44, "cuda"),
        "copies": (2, 33, "cuda"),
        "collectives": (2, 77, "cuda"),
    }
    assert "  GPU1  H100, 80.0 GB, compute capability 9.0" in lines
    assert "  matrix products, fp16      600.000 TFLOP/s" in lines
    assert "  host to GPU, page-locked   50.0 GB/s" in lines
    assert "  disk, read, cache dropped  3.0 GB/s" in lines
    assert "all-reduce, 2 processes (NCCL)" in lines
    assert "  64 MiB  0.500 ms           134.2 GB/s     134.2 GB/s" in lines
    machine = read_machine(Path("machine.json"))
    assert (machine.device, machine.procs, machine.matmul_flops.fp16) == ("cuda", 2, 6e14)
    assert (machine.software.nccl, machine.h2d_bytes_per_s) == ("2.28.3", 5e10)


def test_devices_have_the_numbers_of_nvidia_smi() -> None:
    """CUDA may count in another order, and may use a part of a GPU, which has no number."""
    uuids = ["GPU-89", "GPU-8a", "GPU-5e", "GPU-f0"]

    def numbers(devices: list[str], known: Sequence[str] = uuids) -> list[int | None]:
        found = [{**H100, "uuid": uuid} for uuid in devices]
        return [device.number for device in module._devices(found, known)]

    assert numbers(["GPU-f0", "GPU-8a"]) == [3, 1]
    assert numbers(["GPU-f0", "GPU-of-an-instance"]) == [None, None]
    assert numbers(["GPU-f0"], []) == [None]


def test_gpus_that_are_not_seen_are_left_out() -> None:
    """Numbers are text where JSON has them as keys."""
    found = {"links": [[2, 3, "NV4"], [0, 3, "SYS"]], "numa_nodes": {"0": 0, "2": 1, "3": 1}}
    seen = _topology(found, {3, 2, None})
    assert seen.links == (Link(a="GPU2", b="GPU3", kind="NV4"),)
    assert seen.numa == {"GPU2": "1", "GPU3": "1"}
    assert _topology({}, {0}) == Topology()


@pytest.mark.parametrize(("average", "load"), [(9.0, 0.5), (0.3, 0.0), (33.0, 2.0)])
def test_the_load_is_the_whole_machines(
    monkeypatch: pytest.MonkeyPatch, average: float, load: float
) -> None:
    """A container or a job has few of its cores, and sees the processes on all."""
    monkeypatch.setattr(os, "getloadavg", lambda: (average, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    assert _load() == load


def test_what_hangs_is_reported_and_the_rest_continues(
    tmp_path: Path, invented: Callable[[Measured], None]
) -> None:
    def answer(name: str, procs: int, seconds: float, device: Any) -> RankResults:
        if name == "matmul":
            reason = f"given up after {seconds:.0f} s"
            records = (({"fp32": 2e9},), ())
            return RankResults(records=records, failure=reason, late=True, printed="a log")
        copies = ({"host_copy_bytes_per_s": 1e9},)
        return RankResults(records=(copies,) * 2 if name == "copies" else ())

    invented(answer)
    result = doctor("--json", "--quick", "--procs", "2", "--folder", str(tmp_path))
    told = json.loads(result.stdout)
    late = {"reason": "given up after 7 s", "late": True, "printed": "a log"}
    assert told["failures"] == [{"measurement": "matmul", **late}]
    assert told["matmul_flops"] == {"fp32": 2e9, "bf16": None, "fp16": None}
    assert told["host_copy_bytes_per_s"] == 1e9
    assert told["allreduce"] == []
    severities = {each["seen"]: each["severity"] for each in told["findings"]}
    assert severities["matmul: given up after 7 s"] == "warning"


def test_a_late_import_is_no_fault_of_the_driver(
    tmp_path: Path, invented: Callable[[Measured], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver has two GPUs. torch takes twice the time limit, and the rest is measured within
    its own."""
    now, given = [0.0], []

    def answer(name: str, procs: int, seconds: float, device: Any) -> RankResults:
        given.append(round(seconds))
        if name != "torch":
            return RankResults()
        now[0] += seconds
        return RankResults(records=((),), failure=f"given up after {seconds:.0f} s", late=True)

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(module, "gpu_count", lambda: 2)
    monkeypatch.setattr("pipeline.doctor.inventory.gpu_count", lambda: 2)
    invented(answer)
    result = doctor("--quick", "--procs", "2", "--folder", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "warning: slow-import: importing torch was given up after 80 s" in result.stdout
    assert "driver:" not in result.stdout
    assert "  driver  2 GPUs, none usable by torch" in result.stdout.splitlines()
    assert given == [80, 11, 14, 11, 25]


@pytest.mark.parametrize("runs", ["", "none"])
def test_no_room_for_temporary_files_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: str
) -> None:
    """The rest is reported as not measured."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    monkeypatch.setattr(module, "LIMITS", dict.fromkeys(module.LIMITS, 0.0))
    monkeypatch.setattr(module.inventory, "folders", lambda _: folders(tmp_path / runs))
    result = doctor("--json", "--quick", "--procs", "1", "--folder", str(tmp_path))
    assert result.exit_code == 5
    told = json.loads(result.stdout)
    seen = f"{tmp_path}/none, for temporary files, cannot be written to"
    assert seen in [each["seen"] for each in told["findings"]]
    assert [each["free_bytes"] is None for each in told["folders"]] == [bool(runs), True]
    assert list(tmp_path.iterdir()) == []
    reasons = {each["measurement"]: each["reason"] for each in told["failures"]}
    assert reasons["torch"].startswith("it has no folder for its files: No such file")


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "pipetrain", "doctor"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    parent = psutil.Process(process.pid)
    deadline = time.monotonic() + 20
    while not (children := parent.children()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.terminate()
    _, said = process.communicate(timeout=20)
    assert (process.returncode, said.splitlines()[-1]) == (143, "stopped by SIGTERM")
    assert children
    assert not any(child.is_running() for child in children)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised before anything is measured."""
    monkeypatch.setattr(module, "examine", lambda *_, **__: pytest.fail("measured first"))
    result = doctor("--out", "no/such/folder/machine.json")
    assert result.exit_code == 2
    assert result.stderr == ("error: No such file or directory: no/such/folder/machine.json\n")
