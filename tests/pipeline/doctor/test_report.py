"""The JSON of a machine, and what `pipe doctor` prints, with its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import main
from pipeline.doctor import examine as module
from pipeline.doctor.report import Link, MachineReport, read_machine
from pipeline.errors import UsageError

KEYS = {
    "schema_version": 1,
    "devices": [],
    "procs": 2,
    "host_memory_bytes": 64 * 10**9,
    "matmul_flops": {"fp32": 1e11, "bf16": 1e12, "fp16": None},
    "host_copy_bytes_per_s": 5e9,
    "h2d_bytes_per_s": None,
    "d2h_bytes_per_s": None,
    "disk_write_bytes_per_s": 1e9,
    "disk_read_bytes_per_s": 1e9,
}


def test_round_trip(healthy: MachineReport, tmp_path: Path) -> None:
    told = healthy.model_dump(mode="json") | {"findings": [], "a later version's": 1}
    assert {key: told[key] for key in KEYS} == KEYS
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(told))
    assert read_machine(file) == healthy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("{", "Invalid JSON: EOF while parsing an object at line 1 column 1"),
        ("[]", "Input should be an object"),
        ({"schema_version": 2}, "schema_version: Input should be 1"),
        ({"procs": ...}, "procs: Field required"),
        ({"h2d_bytes_per_s": ...}, "h2d_bytes_per_s: Field required"),
        ({"procs": 0}, "procs: Input should be greater than or equal to 1"),
        (
            {"disk_read_bytes_per_s": 1e-300},
            "disk_read_bytes_per_s: Input should be greater than or equal to 1",
        ),
    ],
)
def test_bad_files(healthy: MachineReport, tmp_path: Path, changes: Any, message: str) -> None:
    file, text = tmp_path / "machine.json", changes
    if isinstance(changes, dict):
        told = healthy.model_dump(mode="json") | changes
        text = json.dumps({key: value for key, value in told.items() if value is not ...})
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        read_machine(file)
    assert str(error.value) == (
        f"{file} does not describe a machine: {message} (pipe doctor --out {file} writes such a "
        "file)"
    )


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"No such file or directory: .*none\.json"):
        read_machine(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="binary does not describe a machine: Invalid JSON"):
        read_machine(tmp_path / "binary")


def test_nvlinks() -> None:
    kinds = ("NV1", "NV18", "NODE", "SYS", "PIX")
    found = [Link(a="GPU0", b="GPU1", kind=kind).is_nvlink for kind in kinds]
    assert found == [True, True, False, False, False]


Doctor = Callable[..., Result]


@pytest.fixture
def doctor(healthy: MachineReport, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Return a call of the command, which finds the healthy machine with changes."""

    def call(*arguments: str, **changes: object) -> Result:
        machine = healthy.model_copy(update=changes)
        monkeypatch.setattr(module, "examine", lambda *_, **__: machine)
        return CliRunner().invoke(main, ["doctor", *arguments])

    return call


def test_the_report(doctor: Doctor) -> None:
    result = doctor()
    assert result.exit_code == 0
    assert result.stdout.endswith("what will hurt\n  nothing\n")
    lines = result.stdout.splitlines()
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


def test_warnings_are_allowed(doctor: Doctor) -> None:
    result = doctor(procs=16)
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


def test_errors_have_an_exit_code(doctor: Doctor, healthy: MachineReport) -> None:
    result = doctor("--json", software=healthy.software.model_copy(update={"gpus": 8}), procs=16)
    assert result.exit_code == 5
    assert result.stderr == "error: training will fail here: 1 error (driver)\n"
    names = [finding["name"] for finding in json.loads(result.stdout)["findings"]]
    assert names == ["driver", "cores"]
