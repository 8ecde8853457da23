"""The folder an export goes to: claim it, fill a partial one beside it, swap.

Only what an earlier export of ours wrote is ever replaced: its manifest says what that is.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from pipeline.errors import ExportError, StageError
from pipeline.files import sync
from pipeline.throughput import human
from stages.export import manifest
from stages.export.manifest import BLOCK, Manifest

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
    try:
        written = manifest.load(folder)
    except ExportError as error:
        return str(error)
    if written is None:
        return f"{folder} holds files that are not an export of ours"
    others = sorted(entries - set(written.files))
    if others and written.proof is not None:
        return f"{folder} holds files that its export did not write: {', '.join(others[:10])}"
    return None


def finished(folder: Path, plan: str) -> Manifest | None:
    """The manifest of the export `plan`, if `folder` holds that and nothing else."""
    if foreign(folder) or not folder.is_dir():
        return None
    found = manifest.load(folder)
    if found is None or found.proof is None or found.plan != plan:
        return None
    return found if all((folder / name).is_file() for name in found.files) else None


def claim(folder: Path, plan: str) -> tuple[Path, Manifest]:
    """A partial folder beside `folder`, and what it already holds of the export `plan`.

    Raises StageError when either folder is not ours.
    """
    partial, previous = _beside(folder, "partial"), _beside(folder, "previous")
    if not folder.exists() and previous.exists():
        # A crash fell between the two renames of an earlier swap.
        previous.replace(folder)
    for place in (folder, partial, previous):
        reason = foreign(place)
        if reason:
            raise StageError(reason, hint="name another folder in the export slot, or move it away")
    if previous.exists():
        shutil.rmtree(previous)
    begun = manifest.load(partial) if partial.exists() else None
    if begun is not None and begun.plan == plan:
        return partial, begun
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    fresh = Manifest(plan=plan, block=BLOCK)
    fresh.save(partial)
    return partial, fresh


def reject(partial: Path) -> None:
    """A later export starts anew instead of going on with what is in the folder."""
    Manifest(plan="", block=BLOCK).save(partial)


def require_space(folder: Path, size: int) -> None:
    """Raise StageError unless the file system has room for `size` bytes and a little more."""
    free = shutil.disk_usage(folder).free
    if free < size + MARGIN:
        raise StageError(
            f"not enough disk space for the export in {folder.parent}: "
            f"{human(size + MARGIN)} needed, {human(free)} available"
        )


def seal(partial: Path, finished: Manifest) -> None:
    """Flush everything to disk, the final manifest last."""
    for name in finished.files:
        if name != manifest.NAME:
            sync(partial / name)
    finished.save(partial)
    sync(partial)


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
