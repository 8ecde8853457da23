"""Read the host, the network, the folders, the kernel's limits and the environment."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from pipeline.doctor.report import Folder, Host, Interface, Kernel, Limit, Network
from pipeline.hardware.host import free_memory, most_processes, usable_cores

MEGABIT = 1e6
LIMITS = {
    "open_files": resource.RLIMIT_NOFILE,
    "locked_memory": resource.RLIMIT_MEMLOCK,
    "processes": resource.RLIMIT_NPROC,
}
MODEL = r"^model name\s*:\s*(.*\S)"
CAPABILITIES = r"^CapEff:\s*([0-9a-f]+)$"
CAP_IPC_LOCK = 1 << 14
PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
VARIABLES = {
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_HOME", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING", "TORCH_DISTRIBUTED_DEBUG", "MASTER_ADDR",
}  # fmt: skip
"""Variables that change how a run goes, besides those that begin with PREFIXES."""


def host() -> Host:
    """Processor, cores and memory, as far as affinity and control groups leave them."""
    return Host(
        system=platform.platform(),
        processor=_search(MODEL, "/proc/cpuinfo") or platform.machine() or None,
        cores=usable_cores(),
        memory_free_bytes=free_memory(),
    )


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
    places = {"runs": runs.resolve(), "temporary files": temporary.resolve()}
    return tuple(
        Folder(
            use=use,  # type: ignore[arg-type]
            path=str(path),
            filesystem=filesystem(path),
            free_bytes=_space(path)[1],
            writable=_takes_files(path),
        )
        for use, path in places.items()
    )


def _space(path: Path) -> tuple[int | None, int | None]:
    """All and free bytes of the file system; None if it cannot be asked."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None, None
    return usage.total, usage.free


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
    capabilities = _search(CAPABILITIES, "/proc/self/status")
    return Kernel(
        limits={name: _limit(number) for name, number in LIMITS.items()},
        processes_in_group=most_processes(),
        locks_freely=bool(int(capabilities, 16) & CAP_IPC_LOCK) if capabilities else None,
        shared_memory_bytes=total,
        shared_memory_free_bytes=free,
    )


def _limit(number: int) -> Limit:
    soft, hard = (
        None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(number)
    )
    return Limit(soft=soft, hard=hard)


def _search(pattern: str, file: str | Path) -> str | None:
    """The pattern's group in the file's first line that has it; None without one."""
    try:
        found = re.search(pattern, Path(file).read_text("utf-8"), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that change how a run goes, and no others, which may hold secrets."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if name in VARIABLES or name.startswith(PREFIXES)
    }
