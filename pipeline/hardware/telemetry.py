"""This machine's GPUs by NVIDIA's driver: readings while they work, and what connects them.

NVIDIA's management library is asked through its own bindings, `pynvml` of nvidia-ml-py.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

THROTTLING = {
    "power cap": ("SwPowerCap",),
    "power brake": ("HwPowerBrakeSlowdown",),
    "heat": ("HwThermalSlowdown", "SwThermalSlowdown"),
    "hardware": ("HwSlowdown",),
}
"""Why a GPU runs slower than it could -> names of the bits in NVML's reasons, after REASON."""
REASON = "nvmlClocksThrottleReason"
ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""NVML's level of two GPUs' nearest common ancestor on PCIe -> nvidia-smi's name of the path."""
DEVICES = Path("/sys/bus/pci/devices")


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
        self._all: list[Any] = []
        self._handles: list[tuple[int, Any]] = []
        # Without a driver nvmlInit raises; a broken one fails in other ways, and this is an extra.
        with contextlib.suppress(Exception):
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml
            count = nvml.nvmlDeviceGetCount()
            self._all = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]
            names = os.environ.get("CUDA_VISIBLE_DEVICES")
            self._handles = list(enumerate(self._all)) if names is None else []
            for name in map(str.strip, (names or "").split(",")):
                matching = [
                    n for n, uuid in enumerate(self.uuids) if name and uuid.startswith(name)
                ]
                if name.isdecimal():
                    matching = [int(name)] if int(name) < count else []
                if len(matching) != 1:  # like CUDA, end at the first name that is unknown
                    break
                self._handles.append((matching[0], self._all[matching[0]]))

    @property
    def kind(self) -> str | None:
        """Name of the first GPU's kind; None without one."""
        names = (self._asked("nvmlDeviceGetName", handle) for _, handle in self._handles[:1])
        return next((_text(name) for name in names if name), None)

    @property
    def driver(self) -> str | None:
        """Version of the kernel driver; None without one."""
        version = self._asked("nvmlSystemGetDriverVersion") if self._nvml else None
        return _text(version) if version else None

    @property
    def uuids(self) -> list[str]:
        """The UUIDs of all GPUs of the machine, by number."""
        return [_text(self._nvml.nvmlDeviceGetUUID(handle)) for handle in self._all]

    def links(self) -> list[tuple[int, int, str]]:
        """Each pair of the machine's GPUs, by number, with the path between them as nvidia-smi
        names it: NV4 (four NVLinks), PIX, PXB, PHB, NODE, SYS."""
        return [
            (a, b, kind)
            for a, b in itertools.combinations(range(len(self._all)), 2)
            if (kind := self._path(self._all[a], self._all[b]))
        ]

    def numa_nodes(self) -> dict[int, int]:
        """Number of each GPU -> its NUMA node, where the system says."""
        found: dict[int, int] = {}
        for number, handle in enumerate(self._all):
            address = self._bus("nvmlDeviceGetPciInfo", handle)[-12:]  # as the kernel writes it
            with contextlib.suppress(OSError, ValueError):
                node = int((DEVICES / address / "numa_node").read_text("ascii"))
                found |= {number: node} if node >= 0 else {}
        return found

    def _path(self, one: Any, other: Any) -> str:
        nvml, remotes = self._nvml, []
        for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 0)):
            if self._asked("nvmlDeviceGetNvLinkState", one, link) == nvml.NVML_FEATURE_ENABLED:
                remotes.append(self._bus("nvmlDeviceGetNvLinkRemotePciInfo", one, link))
        direct = remotes.count(self._bus("nvmlDeviceGetPciInfo", other))
        if direct:
            return f"NV{direct}"
        question = getattr(nvml, "NVML_P2P_CAPS_INDEX_NVLINK", None)
        if remotes and self._asked("nvmlDeviceGetP2PStatus", one, other, question) == 0:
            return f"NV{len(remotes)}"  # through switches
        level = self._asked("nvmlDeviceGetTopologyCommonAncestor", one, other)
        return ANCESTORS.get(level, "")

    def _bus(self, function: str, *arguments: Any) -> str:
        """PCIe address that a function returns, `00000000:17:00.0`; empty if it does not say."""
        found = self._asked(function, *arguments)
        return "" if found is None else _text(found.busId).lower()

    def read(self) -> list[GpuReading]:
        """A reading of each GPU; takes about a millisecond each."""
        nvml, found = self._nvml, []
        for index, handle in self._handles:
            use = self._asked("nvmlDeviceGetUtilizationRates", handle)
            memory = self._asked("nvmlDeviceGetMemoryInfo", handle)
            sensor = nvml.NVML_TEMPERATURE_GPU
            milliwatts = self._asked("nvmlDeviceGetPowerUsage", handle)
            reasons = self._asked("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
            throttled = (
                reason
                for reason, bits in THROTTLING.items()
                if any(reasons & getattr(nvml, f"{REASON}{bit}", 0) for bit in bits)
            )
            reading = GpuReading(
                index=index,
                utilisation=None if use is None else use.gpu / 100,
                memory_bytes=None if memory is None else int(memory.used),
                memory_total_bytes=None if memory is None else int(memory.total),
                temperature=self._asked("nvmlDeviceGetTemperature", handle, sensor),
                watts=None if milliwatts is None else milliwatts / 1000,
                throttled=tuple(throttled),
            )
            found.append(reading)
        return found

    def _asked(self, function: str, *arguments: Any) -> Any:
        """NVML's answer; None where this GPU or driver does not support the question."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None


def _text(value: str | bytes) -> str:
    """A text that older bindings give as bytes."""
    return value.decode() if isinstance(value, bytes) else value
