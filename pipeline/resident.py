"""Memory of this process as the system counts it."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_before: list[int] = []


def model_begins() -> None:
    """Note what is resident before the model's parameters have memory: the interpreter, libraries,
    data. A strategy calls it then; the first call in a process counts."""
    if not _before and _STATUS.exists():
        figures = _status()
        _before.append(figures["VmRSS"] - figures["RssShmem"])


def peak_beyond() -> int | None:
    """Most bytes that were resident at once, less those before the model was built and less shared
    memory, which holds the checkpoints' snapshots. None where the system or the strategy does not
    tell."""
    if not _before:
        return None
    figures = _status()
    return max(figures["VmHWM"] - figures["RssShmem"] - _before[0], 0)


def _status() -> dict[str, int]:
    """Name -> bytes."""
    lines = (line.split() for line in _STATUS.read_text("ascii").splitlines())
    return {line[0].rstrip(":"): int(line[1]) << 10 for line in lines if line[-1] == "kB"}
