"""Memory and cores of this machine, and how much of them is free."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_STATUS = Path("/proc/self/status")
_before: list[int] = []


def free_memory() -> int:
    """Bytes of host memory that a process can still allocate, page cache counted as free; a huge
    number where the system does not say."""
    try:
        free = _figures(Path("/proc/meminfo"))["MemAvailable"] * 1024
    except OSError:
        return sys.maxsize
    left = [free]
    for folder, used, limit in _memory_limits():
        with contextlib.suppress(OSError, ValueError):
            figures = _figures(folder / "memory.stat")
            # Memory that cannot be reclaimed; shared memory (snapshots) is kept like files.
            left.append(limit - sum(figures.get(name, 0) for name in (used, "shmem")))
    return max(min(left), 0)


def total_memory() -> int | None:
    """Bytes of host memory that processes here may hold together: the machine's, or a control
    group's limit; None where the system does not say."""
    try:
        total = _figures(Path("/proc/meminfo"))["MemTotal"] * 1024
    except OSError:
        return None
    return min([total, *(limit for _, _, limit in _memory_limits())])


def oom_kills() -> int:
    """Processes that the system has killed in this process's control groups for lack of memory, so
    far; 0 where it does not say."""
    counts = [0]
    for folder, _ in _groups("memory"):
        with contextlib.suppress(OSError, KeyError, ValueError):
            counts.append(_figures(folder / "memory.events")["oom_kill"])
    return max(counts)


def most_processes() -> int | None:
    """Limit of processes and threads, others' counted, in this process's control groups; None
    without a limit."""
    limits = []
    for folder, _ in _groups("pids"):
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            limits.append(int((folder / "pids.max").read_text("ascii")))
    return min(limits, default=None)


def usable_cores() -> float:
    """Cores that processes here may use together: this process's affinity, or a control group's
    quota, which need not be whole."""
    given = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = [float(given or 1)]
    for folder, old in _groups("cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if old else ("cpu.max",)
        with contextlib.suppress(OSError, ValueError):  # "max", or -1, is no quota
            quota, period = " ".join((folder / name).read_text("ascii") for name in names).split()
            cores += [int(quota) / int(period)] if int(quota) > 0 else []
    return min(cores)


def cores_each(procs: int) -> int:
    """Whole cores, and so compute threads, for each of `procs` processes that share the usable
    ones; at least one."""
    return max(1, int(usable_cores()) // procs)


def _memory_limits() -> Iterator[tuple[Path, str, int]]:
    """Folder, name of the figure of private memory, and limit in bytes, of each limited group."""
    for folder, old in _groups("memory"):
        file, used = ("memory.limit_in_bytes", "rss") if old else ("memory.max", "anon")
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            yield folder, used, int((folder / file).read_text("ascii"))


def _groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Folder of each control group of this process, and of those above, with whether it is of
    version 1."""
    for line in _OWN.read_text("ascii").splitlines() if _OWN.exists() else ():
        _, controllers, place = line.split(":", 2)
        old = controller in controllers.split(",")
        if not old and controllers:
            continue
        root = _CGROUPS / controller if old else _CGROUPS
        for parent in (Path(place), *Path(place).parents):
            yield root / parent.relative_to("/"), old


def _figures(file: Path) -> dict[str, int]:
    """Name -> number, of the lines of a file that have one."""
    lines = (line.replace(":", " ").split() for line in file.read_text("ascii").splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


def model_begins() -> None:
    """Note the resident memory (interpreter, libraries, data) before the model's parameters are
    allocated. A strategy calls it then; the first call in a process counts."""
    if not _before and _STATUS.exists():
        figures = _figures(_STATUS)
        _before.append(figures["VmRSS"] - figures["RssShmem"])


def peak_beyond() -> int | None:
    """Peak of resident bytes beyond that baseline, without shared memory, which holds the
    checkpoints' snapshots. None without a baseline."""
    if not _before:
        return None
    figures = _figures(_STATUS)
    return max(figures["VmHWM"] - figures["RssShmem"] - _before[0], 0) << 10
