"""`pipe doctor`."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner, Result

from pipeline.cli import main
from pipeline.doctor import examine as module
from pipeline.doctor.examine import QUICK
from pipeline.doctor.inventory import folders
from pipeline.doctor.ranks import RankResults
from pipeline.doctor.report import MachineReport, read_machine

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def test_a_whole_examination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examination is real, but tiny."""
    tiny = dataclasses.replace(
        QUICK,
        sizes=(1 << 10, 1 << 12),
        seconds={"collectives": 0.01, "matmul": 0.01, "copies": 0.01, "disk": 1.0},
        copy_bytes=1 << 16,
        disk_bytes=1 << 20,
        total=120.0,
    )
    monkeypatch.setattr(module, "QUICK", tiny)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "runs").mkdir()
    result = doctor("--quick", "--procs", "2", "--json", "--out", "machine.json")
    assert result.exit_code == 0, result.stderr
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
    assert [each["bytes"] for each in told["allreduce"]] == [1 << 10, 1 << 12]
    assert all(each["busbw"] == each["algbw"] > 0 for each in told["allreduce"])
    assert all(each["busbw"] == each["algbw"] / 2 > 0 for each in told["allgather"])
    machine = read_machine(Path("machine.json"))
    assert machine.allreduce[0].seconds == told["allreduce"][0]["seconds"]
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.fixture
def found(healthy: MachineReport, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a call that has an examination find a given machine."""

    def find(machine: MachineReport = healthy) -> None:
        monkeypatch.setattr(module, "examine", lambda *_, **__: machine)

    return find


def test_a_machine_that_nothing_hurts_on(found: Any) -> None:
    found()
    result = doctor()
    assert result.exit_code == 0
    assert result.stdout.endswith("what will hurt\n  nothing\n")


def test_warnings_are_allowed(found: Any, healthy: MachineReport) -> None:
    found(healthy.model_copy(update={"procs": 16}))
    result = doctor()
    assert result.exit_code == 0
    assert result.stdout.endswith(
        """\
what will hurt
  warning: cores: 16 processes share 8 cores
    why: processes wait for each other's turn on a core
    do:  start fewer processes, or give the job more cores (Slurm: --cpus-per-task; docker: --cpus)

  1 warning
"""
    )


def test_errors_have_an_exit_code(found: Any, healthy: MachineReport) -> None:
    software = healthy.software.model_copy(update={"gpus": 8})
    found(healthy.model_copy(update={"software": software, "procs": 16}))
    result = doctor("--json")
    assert result.exit_code == 5
    assert result.stderr == "error: training will fail here: 1 error (driver)\n"
    names = [finding["name"] for finding in json.loads(result.stdout)["findings"]]
    assert names == ["driver", "cores"]


def test_the_report(found: Any) -> None:
    found()
    lines = doctor().stdout.splitlines()
    start = lines.index("measured, 2 processes, per process")
    assert lines[start + 1 : start + 7] == [
        "  matrix products, fp32      0.100 TFLOP/s",
        "  matrix products, bf16      1.000 TFLOP/s",
        "  copy in host memory        5.0 GB/s",
        "  disk, written, synced      1.0 GB/s",
        "  disk, read, cache dropped  1.0 GB/s",
        "",
    ]
    start = lines.index("all-gather, 2 processes (gloo)")
    assert lines[start + 1 : start + 4] == [
        "   size      time  algorithm bandwidth  bus bandwidth",
        "  1 MiB  1.000 ms             1.0 GB/s     524.3 MB/s",
        "  latency: 1000 us, at 1 MiB",
    ]


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"name": "H100", "memory_bytes": 80, "compute_capability": "9.0"}
    told = RankResults(records=(({"cuda": "13.0", "devices": [gpu]},),))
    monkeypatch.setattr(module, "measure", lambda *_, **__: told)
    result = doctor("--procs", "2")
    assert result.exit_code == 2
    assert "error: --procs 2, but this machine has 1 GPU " in result.stderr


def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to two GPUs, and the output; the answers are invented."""
    gpu = {"name": "H100", "memory_bytes": 80 * 10**9, "compute_capability": "9.0"}
    answers: dict[str, list[dict[str, Any]]] = {
        "torch": [{"cuda": "13.0", "nccl": "2.28.3", "devices": [gpu, gpu]}],
        "disk": [{"disk_write_bytes_per_s": 2e9}, {"disk_read_bytes_per_s": 3e9}],
        "matmul": [{"fp32": 5e13}, {"bf16": 7e14}, {"fp16": 6e14}],
        "copies": [{"h2d_bytes_per_s": 5e10}, {"d2h_bytes_per_s": 4e10}],
        "collectives": [{"operation": "allreduce", "bytes": 1 << 26, "seconds": 5e-4}],
    }
    asked: dict[str, tuple[int, float, Any]] = {}

    def measure(target: str, settings: Any, *, procs: int, seconds: float) -> RankResults:
        name = target.removeprefix("pipeline.doctor.measurements:measure_")
        asked[name] = (procs, round(seconds), settings["device"])
        return RankResults(records=(tuple(answers[name]),))

    monkeypatch.setattr(module, "measure", measure)
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
    gpu = {"name": "H100", "memory_bytes": 80, "compute_capability": "9.0"}

    def numbers(devices: list[str], known: Sequence[str] = uuids) -> list[int | None]:
        found = [{**gpu, "uuid": uuid} for uuid in devices]
        return [device.number for device in module._devices(found, known)]

    assert numbers(["GPU-f0", "GPU-8a"]) == [3, 1]
    assert numbers(["GPU-f0", "GPU-of-an-instance"]) == [None, None]
    assert numbers(["GPU-f0"], []) == [None]


def test_what_hangs_is_reported_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(target: str, settings: Any, *, procs: int, seconds: float) -> RankResults:
        if target == "pipeline.doctor.measurements:measure_matmul":
            reason = f"given up after {seconds:.0f} s"
            return RankResults(
                records=(({"fp32": 2e9},), ()), failure=reason, late=True, printed="a log"
            )
        copies = target == "pipeline.doctor.measurements:measure_copies"
        return RankResults(records=(({"host_copy_bytes_per_s": 1e9},),) * 2 if copies else ())

    monkeypatch.setattr(module, "measure", measure)
    result = doctor("--json", "--quick", "--procs", "2", "--folder", str(tmp_path))
    told = json.loads(result.stdout)
    assert told["failures"] == [
        {
            "measurement": "matmul",
            "reason": "given up after 7 s",
            "late": True,
            "printed": "a log",
        }
    ]
    assert told["matmul_flops"] == {"fp32": 2e9, "bf16": None, "fp16": None}
    assert told["host_copy_bytes_per_s"] == 1e9
    assert told["allreduce"] == []
    severities = {each["seen"]: each["severity"] for each in told["findings"]}
    assert severities["matmul: given up after 7 s"] == "warning"


def test_a_late_import_is_no_fault_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver has two GPUs. torch takes twice the time limit, and the rest is measured within
    its own."""
    now, given = [0.0], {}

    def measure(target: str, settings: Any, *, procs: int, seconds: float) -> RankResults:
        given[target] = round(seconds)
        if "torch" not in target:
            return RankResults()
        now[0] += seconds
        return RankResults(records=((),), failure=f"given up after {seconds:.0f} s", late=True)

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(module, "gpu_count", lambda: 2)
    monkeypatch.setattr("pipeline.doctor.inventory.gpu_count", lambda: 2)
    monkeypatch.setattr(module, "measure", measure)
    result = doctor("--quick", "--procs", "2", "--folder", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "warning: slow-import: importing torch was given up after 80 s" in result.stdout
    assert "driver:" not in result.stdout
    assert "  driver  2 GPUs, none usable by torch" in result.stdout.splitlines()
    assert list(given.values()) == [80, 11, 14, 11, 25]


@pytest.mark.parametrize("runs", ["", "none"])
def test_no_room_for_temporary_files_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: str
) -> None:
    """The rest is reported as not measured."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    monkeypatch.setattr(module, "LIMITS", dict.fromkeys(module.LIMITS, 0.0))
    monkeypatch.setattr(module, "folders", lambda _: folders(tmp_path / runs))
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


def test_signals_are_as_before(found: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    found()
    doctor()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_file_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before anything is measured."""
    monkeypatch.setattr(module, "examine", lambda *_, **__: pytest.fail("measured first"))
    result = doctor("--out", "no/such/folder/machine.json")
    assert result.exit_code == 2
    assert result.stderr == ("error: No such file or directory: no/such/folder/machine.json\n")
