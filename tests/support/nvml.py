"""A library in the place of NVIDIA's, which tells of GPUs."""

from __future__ import annotations

import types
from typing import Any


class NvmlError(Exception):
    """An error of the library."""


def library(**changes: Any) -> types.ModuleType:
    """Return a library with three GPUs, the second of which is slowed down; without NVLinks."""
    module = types.ModuleType("pynvml")
    found: dict[str, Any] = {
        "NVMLError": NvmlError,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlClocksThrottleReasonSwPowerCap": 4,
        "nvmlClocksThrottleReasonHwThermalSlowdown": 64,
        "NVML_FEATURE_ENABLED": 1,
        "nvmlInit": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: b"580.95.05",
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


LEVELS = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}


def connected(table: str) -> types.ModuleType:
    """Return a library whose GPUs are connected as in a table of `nvidia-smi topo -m`: rows of
    cells such as `X NV4 SYS`. NVLinks of 18 go through switches."""
    rows = [line.split() for line in table.strip().splitlines()]

    def address(index: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(busId=f"00000000:{index:02X}:00.0".encode())

    def remotes(index: int) -> list[int]:
        """The GPU, or a switch, at the other end of each NVLink of a GPU."""
        found: list[int] = []
        for other, cell in enumerate(rows[index]):
            if cell == "NV18":
                return [200] * 18
            found += [other] * int(cell[2:]) if cell.startswith("NV") else []
        return found

    def remote(index: int, link: int) -> types.SimpleNamespace:
        return address(remotes(index)[link])

    return library(
        NVML_NVLINK_MAX_LINKS=36, NVML_P2P_CAPS_INDEX_NVLINK=2,
        nvmlDeviceGetCount=lambda: len(rows),
        nvmlDeviceGetUUID=lambda index: f"GPU-{index}",
        nvmlDeviceGetPciInfo=address,
        nvmlDeviceGetNvLinkState=lambda index, link: int(link < len(remotes(index))),
        nvmlDeviceGetNvLinkRemotePciInfo=remote,
        nvmlDeviceGetP2PStatus=lambda a, b, _: 0 if rows[a][b].startswith("NV") else 1,
        nvmlDeviceGetTopologyCommonAncestor=lambda a, b: LEVELS.get(rows[a][b], 50),
    )  # fmt: skip
