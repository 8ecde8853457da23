"""Readings of this machine's GPUs while they work: use, memory, temperature, power, throttling.

NVIDIA's management library is asked through its own bindings, `pynvml` of nvidia-ml-py.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

THROTTLING = {
    "power cap": ("nvmlClocksThrottleReasonSwPowerCap",),
    "power brake": ("nvmlClocksThrottleReasonHwPowerBrakeSlowdown",),
    "heat": (
        "nvmlClocksThrottleReasonHwThermalSlowdown",
        "nvmlClocksThrottleReasonSwThermalSlowdown",
    ),
    "hardware": ("nvmlClocksThrottleReasonHwSlowdown",),
}
"""Why a GPU runs slower than it could -> names of the bits in NVML's reasons."""


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """One GPU at a moment. None: the driver does not say."""

    index: int
    """Its number by the driver on this machine."""
    utilisation: float | None
    """Share of the time in which a kernel ran, 0 to 1."""
    memory_bytes: int | None
    """Bytes in use, of all processes."""
    memory_total_bytes: int | None
    temperature: int | None
    """Degrees Celsius."""
    watts: float | None
    throttled: tuple[str, ...]
    """Reasons, as in THROTTLING; empty if it runs at full speed."""


class Telemetry:
    """The GPUs that this process and its children may use. Without NVIDIA's driver, none."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[tuple[int, Any]] = []
        # Without a driver nvmlInit raises; a broken one fails in other ways, and this is an extra.
        with contextlib.suppress(Exception):
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml
            self._handles = list(_visible(nvml, os.environ.get("CUDA_VISIBLE_DEVICES")))

    @property
    def kind(self) -> str | None:
        """Name of the first GPU's kind; None without one."""
        names = (self._asked("nvmlDeviceGetName", handle) for _, handle in self._handles[:1])
        return next((_text(name) for name in names if name), None)

    def read(self) -> list[GpuReading]:
        """Return a reading of each GPU; takes about a millisecond each."""
        return [self._reading(index, handle) for index, handle in self._handles]

    def _reading(self, index: int, handle: Any) -> GpuReading:
        nvml = self._nvml
        use = self._asked("nvmlDeviceGetUtilizationRates", handle)
        memory = self._asked("nvmlDeviceGetMemoryInfo", handle)
        sensor = nvml.NVML_TEMPERATURE_GPU
        milliwatts = self._asked("nvmlDeviceGetPowerUsage", handle)
        reasons = self._asked("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
        return GpuReading(
            index=index,
            utilisation=None if use is None else use.gpu / 100,
            memory_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            temperature=self._asked("nvmlDeviceGetTemperature", handle, sensor),
            watts=None if milliwatts is None else milliwatts / 1000,
            throttled=tuple(
                reason
                for reason, bits in THROTTLING.items()
                if any(reasons & getattr(nvml, bit, 0) for bit in bits)
            ),
        )

    def _asked(self, function: str, *arguments: Any) -> Any:
        """Return what NVML answers; None where this GPU or driver does not support the question."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None


def _visible(nvml: Any, names: str | None) -> Iterator[tuple[int, Any]]:
    """Yield number and handle of the GPUs that CUDA_VISIBLE_DEVICES (`names`) leaves; all if it is
    not set. Like CUDA, end at the first name that is unknown."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
    if names is None:
        yield from enumerate(handles)
        return
    uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    for name in names.split(","):
        number = _number(name.strip(), uuids)
        if number is None:
            return
        yield number, handles[number]


def _number(name: str, uuids: Sequence[str]) -> int | None:
    if name.isdecimal():
        return int(name) if int(name) < len(uuids) else None
    matching = [n for n, uuid in enumerate(uuids) if name and uuid.startswith(name)]
    return matching[0] if len(matching) == 1 else None


def _text(value: str | bytes) -> str:
    """Return a text that older bindings give as bytes."""
    return value.decode() if isinstance(value, bytes) else value
