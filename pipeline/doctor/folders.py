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
        _folder("temporary files", _temporary().resolve()),
    )


def _temporary() -> Path:
    """Where Python puts temporary files, or would if it could write any."""
    try:
        return Path(tempfile.gettempdir())
    except OSError:
        return Path(os.environ.get("TMPDIR") or "/tmp")


def _folder(use: str, path: Path) -> Folder:
    return Folder(
        use=use,  # type: ignore[arg-type]
        path=str(path),
        filesystem=filesystem(path),
        free_bytes=_free(path),
        writable=_takes_files(path),
    )


def _free(path: Path) -> int | None:
    try:
        figures = os.statvfs(path)
    except OSError:
        return None
    return figures.f_bavail * figures.f_frsize


def _takes_files(path: Path) -> bool:
    """By trial: permissions do not say that a file system is full or out of files."""
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"something")
    except OSError:
        return False
    return True


def filesystem(path: Path) -> str | None:
    """Kind of the file system that an absolute `path` is on: of its mount point, the nearest above
    it and of several there the last, which hides the others."""
    above = {str(parent) for parent in (path, *path.parents)}
    mounts = [mount for mount in psutil.disk_partitions(all=True) if mount.mountpoint in above]
    if not mounts:
        return None
    nearest = max(len(mount.mountpoint) for mount in mounts)
    return [mount.fstype for mount in mounts if len(mount.mountpoint) == nearest][-1] or None
