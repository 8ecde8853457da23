"""What `pipe doctor` prints of a machine, and its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import main
from pipeline.doctor import examine as module
from pipeline.doctor.report import MachineReport

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
