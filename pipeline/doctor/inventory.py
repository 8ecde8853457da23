"""Read the host, the network, the folders, the kernel's limits and the environment."""

from __future__ import annotations

import os
import platform
import re
import resource
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import psutil

from pipeline.doctor.report import Folder, Host, Interface, Kernel, Limit, Network
from pipeline.hardware.host import free_memory, most_processes, usable_cores

MEGABIT = 1e6
LIMITS = {
    "open_files": resource.RLIMIT_NOFILE,
    "locked_memory": resource.RLIMIT_MEMLOCK,
    "processes": resource.RLIMIT_NPROC,
    "core": resource.RLIMIT_CORE,
}
CAP_IPC_LOCK = 14
PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
VARIABLES = {
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_HOME", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_DISTRIBUTED_DEBUG", "MASTER_ADDR",
}  # fmt: skip
"""Variables that change how a run goes, besides those that begin with PREFIXES."""


def host() -> Host:
    """Processor, cores and memory, as far as affinity and control groups leave them."""
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
    """The processor's name, or else its architecture."""
    name = re.search(r"^model name\s*:\s*(.*\S)", _text(file) or "", re.MULTILINE)
    return name[1] if name else platform.machine() or None


def network() -> Network:
    """Interfaces that are up, and RDMA devices; a speed that the driver does not report is None."""
    interfaces = tuple(
        Interface(name=name, bits_per_s=state.speed * MEGABIT or None)
        for name, state in sorted(psutil.net_if_stats().items())
        if state.isup and "loopback" not in state.flags.split(",")
    )
    rdma = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    return Network(interfaces=interfaces, rdma=tuple(rdma))


def folders(runs: Path) -> tuple[Folder, ...]:
    """The folder of runs, and that of temporary files."""
    try:
        temporary = Path(tempfile.gettempdir())
    except OSError:  # there is none that Python can write to
        temporary = Path(os.environ.get("TMPDIR") or "/tmp")
    return _folder("runs", runs.resolve()), _folder("temporary files", temporary.resolve())


def _folder(use: Literal["runs", "temporary files"], path: Path) -> Folder:
    return Folder(
        use=use,
        path=str(path),
        filesystem=filesystem(path),
        free_bytes=_space(path)[1],
        writable=_takes_files(path),
    )


def _space(path: Path) -> tuple[int | None, int | None]:
    """All and free bytes of the file system; None if it cannot be asked."""
    try:
        figures = os.statvfs(path)
    except OSError:
        return None, None
    return figures.f_blocks * figures.f_frsize, figures.f_bavail * figures.f_frsize


def _takes_files(path: Path) -> bool:
    """Whether a file can be written; permissions do not show that a file system is full."""
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"something")
    except OSError:
        return False
    return True


def filesystem(path: Path) -> str | None:
    """Kind of the file system that holds the absolute `path`.

    It is that of the nearest mount point above, and the last one mounted there, which hides others.
    """
    above = {str(parent) for parent in (path, *path.parents)}
    mounts = [mount for mount in psutil.disk_partitions(all=True) if mount.mountpoint in above]
    if not mounts:
        return None
    nearest = max(len(mount.mountpoint) for mount in mounts)
    return [mount.fstype for mount in mounts if len(mount.mountpoint) == nearest][-1] or None


def kernel() -> Kernel:
    """Limits and settings; None if the system does not report one."""
    total, free = _space(Path("/dev/shm"))
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


def _limit(number: int) -> Limit:
    soft, hard = (
        None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(number)
    )
    return Limit(soft=soft, hard=hard)


def _locks_freely(status: Path) -> bool | None:
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", _text(status) or "", re.MULTILINE)
    return bool(int(found[1], 16) >> CAP_IPC_LOCK & 1) if found else None


def _chosen(file: Path) -> str | None:
    """The option in brackets, as in `always [madvise] never`."""
    found = re.search(r"\[(\w+)\]", _text(file) or "")
    return found[1] if found else None


def _text(file: Path) -> str | None:
    try:
        return file.read_text("utf-8").strip()
    except OSError:
        return None


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that change how a run goes, and no others, which may hold secrets."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if name in VARIABLES or name.startswith(PREFIXES)
    }
