"""What the system says of a process: its memory, what it has read, its processor time."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple


class Footprint(NamedTuple):
    """Bytes. `anon` is memory that no file backs: what a machine must have free for it."""

    rss: int
    anon: int


def footprint(process: int | str = "self") -> Footprint | None:
    """Of a process now; None when it is gone."""
    with contextlib.suppress(OSError):
        found = _figures(Path("/proc", str(process), "status"))
        if "VmRSS" in found:
            return Footprint(found["VmRSS"] * 1024, found["RssAnon"] * 1024)
    return None


def forget_peak() -> None:
    """The peak of this process's resident memory starts anew: proc(5)."""
    Path("/proc/self/clear_refs").write_text("5", "ascii")


def peak() -> int:
    """Most bytes of resident memory that this process had since then."""
    return _figures(Path("/proc/self/status"))["VmHWM"] * 1024


def bytes_read() -> int:
    """What this process's read calls have returned so far; pages of mapped files do not count."""
    return _figures(Path("/proc/self/io"))["rchar"]


def _figures(file: Path) -> dict[str, int]:
    lines = (line.split() for line in file.read_text("ascii").splitlines())
    return {line[0].rstrip(":"): int(line[1]) for line in lines if line[1:] and line[1].isdigit()}
