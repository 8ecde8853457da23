"""Disk space and host memory for the rest of a run, checked before training starts."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import StageError
from pipeline.hardware.host import free_memory
from pipeline.utils.text import human


@dataclass(frozen=True, kw_only=True)
class ResourceNeed:
    """Disk space and host memory that a stage will need on this machine."""

    what: str
    """Purpose, as in `needs 3.2 GB for ...`."""
    disk: int = 0
    """Bytes in `folder`, beyond what is there already."""
    folder: Path | None = None
    """Need not exist yet."""
    memory: int = 0
    """Bytes of host memory on rank 0's machine, at one time."""
    kept: bool = False
    """Whether the memory is allocated from now on, in addition to all other needs."""


def require_resources(needs: Iterable[ResourceNeed]) -> None:
    """Raise StageError naming every file system that is too small, and host memory, with what needs
    it. Needs on one file system add up, and memory that is kept; of other memory the largest need
    counts."""
    needs, problems = list(needs), []
    devices: dict[int, list[tuple[Path, ResourceNeed]]] = defaultdict(list)
    for need in needs:
        if need.folder is not None and need.disk:
            devices[_existing(need.folder).stat().st_dev].append((need.folder, need))
    for here in devices.values():
        free = shutil.disk_usage(_existing(here[0][0])).free
        if sum(need.disk for _, need in here) > free:
            parts = ", ".join(f"{human(need.disk)} for {need.what}" for _, need in here)
            problems.append(
                f"not enough disk space in {here[0][0]}: {parts}, {human(free)} available"
            )
    free = free_memory()
    for need in sorted(needs, key=lambda need: not need.kept):
        if need.memory > free:
            parts = f"{human(need.memory)} for {need.what}"
            problems.append(f"not enough host memory: {parts}, {human(free)} available")
        elif need.kept:
            free -= need.memory
    if problems:
        raise StageError("; ".join(problems), hint="make room, or write elsewhere")


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    return folder if folder.exists() else _existing(folder.parent)
