"""Disk space and host memory for the rest of a run, checked before training starts."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from pipeline.contracts.stage import ResourceNeed
from pipeline.errors import StageError
from pipeline.hardware.host import free_memory
from pipeline.utils.text import human


def require_resources(rooms: Iterable[ResourceNeed]) -> None:
    """Raise StageError naming every file system that is too small, and host memory, with what needs
    it. Needs on one file system add up; for memory the largest need counts."""
    rooms = list(rooms)
    problems = [*_short_of_disk(rooms), *_short_of_memory(rooms)]
    if problems:
        raise StageError("; ".join(problems), hint="make room, or write elsewhere")


def _short_of_disk(rooms: Sequence[ResourceNeed]) -> Iterable[str]:
    devices: dict[int, list[ResourceNeed]] = defaultdict(list)
    for room in rooms:
        if room.folder is not None and room.disk:
            devices[_existing(room.folder).stat().st_dev].append(room)
    for here in devices.values():
        assert here[0].folder is not None
        free = shutil.disk_usage(_existing(here[0].folder)).free
        total = sum(room.disk for room in here)
        if total > free:
            parts = ", ".join(f"{human(room.disk)} for {room.what}" for room in here)
            yield f"not enough disk space in {here[0].folder}: {parts}, {human(free)} available"


def _short_of_memory(rooms: Sequence[ResourceNeed]) -> Iterable[str]:
    free = free_memory()
    for room in rooms:
        if room.memory > free:
            yield (
                f"not enough host memory: {human(room.memory)} for {room.what}, "
                f"{human(free)} available"
            )


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    return folder if folder.exists() else _existing(folder.parent)
