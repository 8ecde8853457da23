"""Where a run writes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import psutil

from pipeline.doctor.report import Folder


def folders(runs: Path) -> tuple[Folder, ...]:
    """The folder where runs go, and that of temporary files."""
    return (
        _folder("runs", runs.resolve()),
        _folder("temporary files", Path(tempfile.gettempdir()).resolve()),
    )


def _folder(use: str, path: Path) -> Folder:
    figures = os.statvfs(path)
    return Folder(
        use=use,  # type: ignore[arg-type]
        path=str(path),
        filesystem=filesystem(path),
        free_bytes=figures.f_bavail * figures.f_frsize,
        writable=os.access(path, os.W_OK | os.X_OK),
    )


def filesystem(path: Path) -> str | None:
    """Kind of the file system that an absolute `path` is on: of its mount point, the nearest above
    it and of several there the last, which hides the others."""
    above = {str(parent) for parent in (path, *path.parents)}
    mounts = [mount for mount in psutil.disk_partitions(all=True) if mount.mountpoint in above]
    if not mounts:
        return None
    nearest = max(len(mount.mountpoint) for mount in mounts)
    return [mount.fstype for mount in mounts if len(mount.mountpoint) == nearest][-1] or None
