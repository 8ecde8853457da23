"""The processor, the memory and the system."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil

from pipeline.doctor.report import Host
from pipeline.machine import free_memory, usable_cores


def host() -> Host:
    """What this process may use, control groups counted in."""
    swap = psutil.swap_memory()
    return Host(
        system=platform.platform(),
        processor=_processor(Path("/proc/cpuinfo")),
        cores=usable_cores(),
        cores_present=os.cpu_count(),
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        memory_free_bytes=free_memory(),
        swap_bytes=swap.total,
        swap_used_bytes=swap.used,
    )


def _processor(file: Path) -> str | None:
    """Its name; on machines whose kernel tells none, the architecture."""
    for line in file.read_text("utf-8").splitlines() if file.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine() or None
