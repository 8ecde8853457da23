"""What accelerators this machine has, told without importing torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def gpu_count(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> int:
    """GPUs that a process here would see: the driver's, or CUDA_VISIBLE_DEVICES' choice of them."""
    present = len(_entries(root / "proc/driver/nvidia/gpus", "*"))
    present = present or len(_entries(root / "dev", "nvidia[0-9]*"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    chosen = 0
    for device in visible.split(","):
        # CUDA ignores everything from the first entry that names no device
        if not device.strip() or device.strip().startswith("-"):
            break
        chosen += 1
    return min(present, chosen)


def _entries(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern)) if folder.is_dir() else []
