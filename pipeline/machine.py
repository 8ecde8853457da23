"""What this machine has left."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def free_memory() -> int:
    """Bytes of host memory that a process can still take, page cache counted as free; a number
    without meaning where the system does not say."""
    try:
        free = _figures(Path("/proc/meminfo"))["MemAvailable"] * 1024
    except OSError:
        return sys.maxsize
    return max(min(free, *_left_in_groups(), sys.maxsize), 0)


def _left_in_groups() -> Iterator[int]:
    """Of every control group that this process is in, and those above them, of either version."""
    for folder, limit, used in _groups():
        with contextlib.suppress(OSError, ValueError, KeyError):
            figures = _figures(folder / "memory.stat")
            # Memory that cannot be taken back; what is shared (snapshots) is kept like files.
            held = sum(figures.get(name, 0) for name in (used, "shmem"))
            yield int((folder / limit).read_text("ascii")) - held


def _groups() -> Iterator[tuple[Path, str, str]]:
    """Folder, name of the file with the limit, and of the figure of private memory."""
    for line in _OWN.read_text("ascii").splitlines() if _OWN.exists() else ():
        _, controllers, place = line.split(":", 2)
        old = "memory" in controllers.split(",")
        if not old and controllers:
            continue
        root = _CGROUPS / "memory" if old else _CGROUPS
        names = ("memory.limit_in_bytes", "rss") if old else ("memory.max", "anon")
        for parent in (Path(place), *Path(place).parents):
            yield (root / parent.relative_to("/"), *names)


def _figures(file: Path) -> dict[str, int]:
    lines = (line.replace(":", " ").split() for line in file.read_text("ascii").splitlines())
    return {line[0]: int(line[1]) for line in lines}
