"""Readings of GPUs, from a library in the place of NVIDIA's."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.hardware.telemetry import GpuReading, Telemetry
from tests.support.nvml import NvmlError, connected, library


def readings(
    monkeypatch: pytest.MonkeyPatch, visible: str | None = None, **changes: Any
) -> list[GpuReading]:
    monkeypatch.setitem(sys.modules, "pynvml", library(**changes))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return Telemetry().read()


def test_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found = readings(monkeypatch)
    assert [gpu.index for gpu in found] == [0, 1, 2]
    assert found[1] == GpuReading(
        index=1, utilisation=0.91, memory_bytes=1, memory_total_bytes=4, temperature=71,
        watts=650.0, throttled=("power cap", "heat"),
    )  # fmt: skip
    assert found[0].throttled == ()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("2,0", [2, 0]), ("1,7,0", [1]), ("GPU-b", [1]), ("GPU-", []), ("", []), ("-1", [])],
)
def test_those_that_cuda_would_use(
    visible: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [gpu.index for gpu in readings(monkeypatch, visible)] == expected


def test_what_a_driver_does_not_say_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any) -> Any:
        raise NvmlError

    found = readings(
        monkeypatch, nvmlDeviceGetPowerUsage=refused, nvmlDeviceGetUtilizationRates=refused,
        nvmlDeviceGetCurrentClocksThrottleReasons=refused,
    )  # fmt: skip
    assert (found[0].watts, found[0].utilisation, found[0].throttled) == (None, None, ())
    assert found[0].temperature == 70


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise NvmlError("no driver")

    assert readings(monkeypatch, nvmlInit=fails) == []
    assert Telemetry().kind is None


PAIRS = "X NV4 SYS SYS\nNV4 X SYS SYS\nSYS SYS X NV4\nSYS SYS NV4 X"
PCIE = "X PIX PHB NODE\nPIX X NODE NODE\nPHB NODE X PXB\nNODE NODE PXB X"


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (PAIRS, ["NV4", "SYS", "SYS", "SYS", "SYS", "NV4"]),
        (PCIE, ["PIX", "PHB", "NODE", "NODE", "NODE", "PXB"]),
        ("X NV18 NV18\nNV18 X NV18\nNV18 NV18 X", ["NV18"] * 3),
        ("X", []),
    ],
)
def test_the_paths_between_gpus(
    table: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", connected(table))
    monkeypatch.setattr("pipeline.hardware.telemetry.DEVICES", tmp_path)
    for number, node in enumerate(("0", "-1")):  # -1: the system does not say
        (tmp_path / f"0000:{number:02x}:00.0").mkdir()
        (tmp_path / f"0000:{number:02x}:00.0" / "numa_node").write_text(node + "\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # the paths are the machine's
    gpus = Telemetry()
    count = len(table.splitlines())
    pairs = list(itertools.combinations(range(count), 2))
    assert gpus.links() == [(*pair, kind) for pair, kind in zip(pairs, expected, strict=True)]
    assert (gpus.driver, gpus.numa_nodes()) == ("580.95.05", {0: 0})
    assert gpus.uuids == [f"GPU-{number}" for number in range(count)]


def test_a_driver_that_knows_no_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library())
    gpus = Telemetry()
    assert (gpus.links(), gpus.numa_nodes()) == ([], {})
