"""A process's memory, bytes read and processor time, as the system reports them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple


class Footprint(NamedTuple):
    """Memory in bytes. `anon` is memory that no file backs, so the machine must have it free."""

    rss: int
    anon: int


def footprint(process: int | str = "self") -> Footprint | None:
    """Return the current memory of a process; None when it has ended."""
    with contextlib.suppress(OSError):
        found = _figures(Path("/proc", str(process), "status"))
        if "VmRSS" in found:
            return Footprint(found["VmRSS"] * 1024, found["RssAnon"] * 1024)
    return None


def forget_peak() -> None:
    """Reset the peak of this process's resident memory: proc(5)."""
    Path("/proc/self/clear_refs").write_text("5", "ascii")


def peak() -> int:
    """Return the peak of this process's resident memory since the reset, in bytes."""
    return _figures(Path("/proc/self/status"))["VmHWM"] * 1024


def bytes_read() -> int:
    """Return the bytes that this process's read calls have returned; pages of mapped files do not
    count."""
    return _figures(Path("/proc/self/io"))["rchar"]


def _figures(file: Path) -> dict[str, int]:
    lines = (line.split() for line in file.read_text("ascii").splitlines())
    return {line[0].rstrip(":"): int(line[1]) for line in lines if line[1:] and line[1].isdigit()}
