"""What this machine has left."""

from __future__ import annotations

import contextlib
from pathlib import Path

_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.stat", "anon"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.stat", "rss"),
)
"""Of the control group that this process is in, of either version: its limit, its figures, and the
one that counts memory which cannot be taken back."""


def free_memory() -> int:
    """Bytes of host memory that a process can still take, page cache counted as free."""
    free = _figures(Path("/proc/meminfo"))["MemAvailable"] * 1024
    for limit, figures, used in _GROUPS:
        with contextlib.suppress(OSError, ValueError, KeyError):
            free = min(free, int(Path(limit).read_text("ascii")) - _figures(Path(figures))[used])
    return max(free, 0)


def _figures(file: Path) -> dict[str, int]:
    lines = (line.replace(":", " ").split() for line in file.read_text("ascii").splitlines())
    return {line[0]: int(line[1]) for line in lines}
