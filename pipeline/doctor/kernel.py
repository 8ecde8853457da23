"""Limits and settings of the system."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping
from pathlib import Path

from pipeline.doctor.report import Kernel, Limit
from pipeline.machine import most_processes

LIMITS = {
    "open_files": resource.RLIMIT_NOFILE,
    "locked_memory": resource.RLIMIT_MEMLOCK,
    "processes": resource.RLIMIT_NPROC,
    "core": resource.RLIMIT_CORE,
}
CAP_IPC_LOCK = 14
PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_HOME",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_DISTRIBUTED_DEBUG",
    "MASTER_ADDR",
)
"""Variables that change how, or how fast, a run goes; with all that begin with PREFIXES."""


def kernel() -> Kernel:
    """What the system says; None where it does not."""
    total, free = _shared_memory(Path("/dev/shm"))
    overcommit = _text(Path("/proc/sys/vm/overcommit_memory"))
    return Kernel(
        limits={name: _limit(number) for name, number in LIMITS.items()},
        processes_in_group=most_processes(),
        locks_freely=_locks_freely(Path("/proc/self/status")),
        shared_memory_bytes=total,
        shared_memory_free_bytes=free,
        transparent_huge_pages=_chosen(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        overcommit_memory=int(overcommit) if overcommit else None,
    )


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Those of `variables` that matter here, and no other: they may hold secrets."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if name in VARIABLES or name.startswith(PREFIXES)
    }


def _limit(number: int) -> Limit:
    soft, hard = (
        None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(number)
    )
    return Limit(soft=soft, hard=hard)


def _locks_freely(status: Path) -> bool | None:
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", _text(status) or "", re.MULTILINE)
    return bool(int(found[1], 16) >> CAP_IPC_LOCK & 1) if found else None


def _shared_memory(folder: Path) -> tuple[int | None, int | None]:
    try:
        figures = os.statvfs(folder)
    except OSError:
        return None, None
    return figures.f_blocks * figures.f_frsize, figures.f_bavail * figures.f_frsize


def _chosen(file: Path) -> str | None:
    """The one in brackets: `always [madvise] never`."""
    found = re.search(r"\[(\w+)\]", _text(file) or "")
    return found[1] if found else None


def _text(file: Path) -> str | None:
    try:
        return file.read_text("ascii").strip()
    except OSError:
        return None
