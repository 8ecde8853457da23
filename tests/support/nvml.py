"""A library in the place of NVIDIA's, which tells of GPUs."""

from __future__ import annotations

import types
from typing import Any


class NvmlError(Exception):
    """An error of the library."""


def library(**changes: Any) -> types.ModuleType:
    """Return a library with three GPUs, the second of which is slowed down."""
    module = types.ModuleType("pynvml")
    found: dict[str, Any] = {
        "NVMLError": NvmlError,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlClocksThrottleReasonSwPowerCap": 4,
        "nvmlClocksThrottleReasonHwThermalSlowdown": 64,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{'abc'[handle]}",
        "nvmlDeviceGetName": lambda handle: "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetUtilizationRates": lambda handle: types.SimpleNamespace(gpu=90 + handle),
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(used=1, total=4),
        "nvmlDeviceGetTemperature": lambda handle, sensor: 70 + handle,
        "nvmlDeviceGetPowerUsage": lambda handle: 650_000,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 68 if handle == 1 else 1,
    }
    for name, value in {**found, **changes}.items():
        setattr(module, name, value)
    return module
