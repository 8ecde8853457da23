"""Limits and settings of the system."""

from __future__ import annotations

import os
import platform
import re
import resource
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from pipeline.doctor.report import Folder, Host, Interface, Kernel, Limit, Network
from pipeline.hardware.host import free_memory, most_processes, usable_cores


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


MEGABIT = 1e6


def network() -> Network:
    """Interfaces that are up, and RDMA devices. A speed that the driver does not tell is None."""
    interfaces = tuple(
        Interface(name=name, bits_per_s=state.speed * MEGABIT or None)
        for name, state in sorted(psutil.net_if_stats().items())
        if state.isup and "loopback" not in state.flags.split(",")
    )
    rdma = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    return Network(interfaces=interfaces, rdma=tuple(rdma))


def folders(runs: Path) -> tuple[Folder, ...]:
    """The folder where runs go, and that of temporary files."""
    return (
        _folder("runs", runs.resolve()),
        _folder("temporary files", _temporary().resolve()),
    )


def _temporary() -> Path:
    """Where Python puts temporary files, or would if it could write any."""
    try:
        return Path(tempfile.gettempdir())
    except OSError:
        return Path(os.environ.get("TMPDIR") or "/tmp")


def _folder(use: str, path: Path) -> Folder:
    return Folder(
        use=use,  # type: ignore[arg-type]
        path=str(path),
        filesystem=filesystem(path),
        free_bytes=_free(path),
        writable=_takes_files(path),
    )


def _free(path: Path) -> int | None:
    try:
        figures = os.statvfs(path)
    except OSError:
        return None
    return figures.f_bavail * figures.f_frsize


def _takes_files(path: Path) -> bool:
    """By trial: permissions do not say that a file system is full or out of files."""
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"something")
    except OSError:
        return False
    return True


def filesystem(path: Path) -> str | None:
    """Kind of the file system that an absolute `path` is on: of its mount point, the nearest above
    it and of several there the last, which hides the others."""
    above = {str(parent) for parent in (path, *path.parents)}
    mounts = [mount for mount in psutil.disk_partitions(all=True) if mount.mountpoint in above]
    if not mounts:
        return None
    nearest = max(len(mount.mountpoint) for mount in mounts)
    return [mount.fstype for mount in mounts if len(mount.mountpoint) == nearest][-1] or None


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
