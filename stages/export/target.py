"""The folder an export goes to: claim it, fill a partial one beside it, swap.

Only what an earlier export of ours wrote is ever replaced: its manifest says what that is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import StageError
from pipeline.files import sync
from stages.export.sizes import human

MANIFEST = "export.json"
WRITER = "pipetrain export.safetensors"
MARGIN = 16 << 20
"""Room for config and tokenizer beside the weights."""


def foreign(folder: Path) -> str | None:
    """Why `folder` must not be replaced; None when absent, empty or wholly an export of ours."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        return f"{folder} is not a folder"
    entries = {entry.name for entry in folder.iterdir()}
    if not entries:
        return None
    manifest = _manifest(folder)
    if manifest is None:
        return f"{folder} holds files that are not an export of ours"
    others = sorted(entries - set(manifest["files"]) - {MANIFEST})
    if others and manifest["complete"]:
        return f"{folder} holds files that its export did not write: {', '.join(others[:10])}"
    return None


def claim(folder: Path) -> Path:
    """A fresh, empty partial folder beside `folder`. Raises StageError when either is not ours."""
    partial, previous = _beside(folder, "partial"), _beside(folder, "previous")
    if not folder.exists() and previous.exists():
        # A crash fell between the two renames of an earlier swap.
        previous.replace(folder)
    for place in (folder, partial, previous):
        reason = foreign(place)
        if reason:
            raise StageError(reason, hint="name another folder in the export slot, or move it away")
    for place in (partial, previous):
        if place.exists():
            shutil.rmtree(place)
    partial.mkdir(parents=True)
    _write_manifest(partial, files=[], complete=False)
    return partial


def require_space(folder: Path, size: int) -> None:
    """Raise StageError unless the file system has room for `size` bytes and a little more."""
    free = shutil.disk_usage(folder).free
    if free < size + MARGIN:
        raise StageError(
            f"not enough disk space for the export in {folder.parent}: "
            f"{human(size + MARGIN)} needed, {human(free)} available"
        )


def seal(partial: Path, facts: dict[str, Any]) -> Sequence[str]:
    """Write the final manifest and flush everything to disk. Returns the names of all files."""
    files = sorted(entry.name for entry in partial.iterdir())
    files = sorted({*files, MANIFEST})
    _write_manifest(partial, files=files, complete=True, **facts)
    for name in files:
        sync(partial / name)
    sync(partial)
    return files


def swap(partial: Path, folder: Path) -> None:
    """Put the finished partial folder in place of an earlier export."""
    previous = _beside(folder, "previous")
    if folder.exists():
        folder.replace(previous)
    partial.replace(folder)
    sync(folder.parent)
    if previous.exists():
        shutil.rmtree(previous)


def _beside(folder: Path, what: str) -> Path:
    return folder.with_name(f"{folder.name}.{what}")


def _manifest(folder: Path) -> dict[str, Any] | None:
    try:
        content = json.loads((folder / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    ours = isinstance(content, dict) and content.get("writer") == WRITER
    return content if ours else None


def _write_manifest(folder: Path, *, files: Sequence[str], complete: bool, **facts: Any) -> None:
    content = {"writer": WRITER, "complete": complete, "files": list(files), **facts}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
