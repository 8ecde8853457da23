"""Readings of GPUs, from a library in the place of NVIDIA's."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pipeline.hardware.telemetry import GpuReading, Telemetry
from tests.support.nvml import NvmlError, library


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
