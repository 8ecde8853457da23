"""The JSON of a machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.doctor.measurements import bandwidth
from pipeline.doctor.report import MachineReport, read_machine
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
    told = healthy.model_dump(mode="json") | {"findings": [], "of a later version": 1}
    assert {key: told[key] for key in KEYS} == KEYS
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(told))
    assert read_machine(file) == healthy


def test_bandwidths() -> None:
    """The definitions are those of nccl-tests, for 4 processes and 1 MB in 1 ms."""
    reduced = bandwidth("allreduce", 10**6, 1e-3, 4)
    assert (reduced.algbw, reduced.busbw) == pytest.approx((1e9, 1.5e9))
    gathered = bandwidth("allgather", 10**6, 1e-3, 4)
    assert (gathered.algbw, gathered.busbw) == pytest.approx((1e9, 0.75e9))


def without(key: str, told: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in told.items() if name != key})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda told: "{", "Invalid JSON: EOF while parsing an object at line 1 column 1"),
        (lambda told: "[]", "Input should be an object"),
        (lambda told: json.dumps({"schema_version": 2}), "schema_version: Input should be 1"),
        (lambda told: without("procs", told), "procs: Field required"),
        (lambda told: without("h2d_bytes_per_s", told), "h2d_bytes_per_s: Field required"),
        (
            lambda told: json.dumps(told | {"procs": 0}),
            "procs: Input should be greater than or equal to 1",
        ),
        (
            lambda told: json.dumps(told | {"disk_read_bytes_per_s": 1e-300}),
            "disk_read_bytes_per_s: Input should be greater than or equal to 1",
        ),
    ],
)
def test_bad_files(healthy: MachineReport, tmp_path: Path, make: Any, message: str) -> None:
    file = tmp_path / "machine.json"
    file.write_text(make(healthy.model_dump(mode="json")))
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
