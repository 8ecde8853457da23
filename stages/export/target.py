"""The folder an export goes to: claim it, fill a partial one next to it, swap.

Only files that an earlier export wrote, by its manifest, are ever replaced. An earlier export that
is damaged, or was changed by hand, is kept aside.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from pipeline import Context, ExportError, StageError, in_words
from pipeline.utils import sync, sync_tree
from stages.export import manifest
from stages.export.manifest import Manifest

EDITABLE = (manifest.CARD, "generation_config.json", "chat_template.jinja")
"""Files of an export that people change, and that it can be used with."""
PARTIAL = ".partial"
"""Suffix of the folder of an unfinished export, which is emptied when its plan changes."""


def foreign(folder: Path) -> str | None:
    """The reason why nothing may take the place of `folder`; None for an export, one that had just
    begun, or nothing."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        return f"{folder} is not a folder"
    if os.path.ismount(folder):
        return f"{folder} is a mount point, which cannot be replaced"
    if {entry.name for entry in folder.iterdir()} <= {manifest.UNFINISHED}:
        return None
    try:
        written = manifest.load(folder)
    except ExportError:
        return None  # it is kept aside
    if written is None:
        return f"{folder} holds other files than an export by pipe"
    added = manifest.names_in(folder) - set(written.files) if written.proof is not None else ()
    if added:
        return f"{folder} holds files that were added after its export: {_names(added)}"
    return None


def changed(folder: Path) -> str | None:
    """Return the changes of an export since it was written, in words; None without any, or if there
    is none. Weights are not looked at: a new export replaces them."""
    try:
        written = manifest.load(folder)
        if written is None or written.proof is None:
            return None
        found = written.beside(folder).items() - written.others.items()
    except (ExportError, OSError) as error:
        return in_words(error)
    return f"changed after it was written: {_names(dict(found))}" if found else None


def damaged(folder: Path, written: Manifest) -> str | None:
    """Return what is wrong with a finished export, in words: a file that is missing, cut, or not as
    it was written. None if nothing is; weights are not read, and EDITABLE files may differ."""
    for name in written.files:
        if not (folder / name).is_file():
            return f"{name} is missing"
    for name, entry in written.weights.items():
        size = (folder / name).stat().st_size
        if size != entry.size:
            return f"{name} has {size:,} bytes instead of {entry.size:,}"
    for name, expected in written.others.items():
        if name not in EDITABLE and manifest.content_sum(folder / name) != expected:
            return f"{name} is not as it was written"
    return None


def _names(files: Collection[str]) -> str:
    return ", ".join(sorted(files)[:10])


def target_of(name: str | None, ctx: Context) -> Path:
    """The folder of the export; links are followed, so that it is replaced where it really is."""
    folder = Path(name).expanduser() if name else ctx.run_dir / "export"
    return folder.resolve()


def partial_of(folder: Path) -> Path:
    """The folder in which the export is written until it is proven."""
    return folder.with_name(folder.name + PARTIAL)


def _previous_of(folder: Path) -> Path:
    """The hidden place of the earlier export during a swap."""
    return folder.with_name(f".{folder.name}.previous")


def finished(folder: Path, plan: str) -> Manifest | None:
    """The manifest of the export `plan`, if `folder` holds that and nothing else."""
    if foreign(folder) is not None or changed(folder) is not None:
        return None
    found = manifest.load(folder)
    if found is None or found.proof is None or found.plan != plan:
        return None
    whole = all((folder / name).is_file() for name in found.weights)
    return found if whole and found.others == found.beside(folder) else None


def claim(folder: Path, plan: str, held: contextlib.ExitStack, log: logging.Logger) -> Manifest:
    """Make the partial folder of `folder`, which no other process can claim until `held` ends;
    returns the manifest of what it holds of the export `plan`. Raises StageError if another process
    has claimed it, and if a folder must not be replaced."""
    partial, previous = partial_of(folder), _previous_of(folder)
    if not folder.exists() and previous.exists():
        # A crash fell between the two renames of an earlier swap.
        previous.replace(folder)
    for place in (folder, partial, previous):
        reason = foreign(place)
        if reason:
            raise StageError(reason, hint="name another folder in the export slot, or move it away")
        damage = changed(place)
        if damage:
            log.warning("%s: %s; it is kept as %s", place, damage, _aside(place))
    shutil.rmtree(previous, ignore_errors=True)
    partial.mkdir(parents=True, exist_ok=True)
    _lock(partial, held)
    begun = manifest.load(partial)
    if begun is None or begun.plan != plan:
        clear(partial)
        begun = Manifest(plan=plan)
        begun.save(partial)
    return begun


def _aside(folder: Path) -> Path:
    """Rename a folder, so that nothing in it is lost; its new place."""
    places = (folder.with_name(f"{folder.name}.changed-{count}") for count in itertools.count(1))
    place = next(each for each in places if not each.exists())
    folder.rename(place)
    return place


def _lock(partial: Path, held: contextlib.ExitStack) -> None:
    descriptor = os.open(partial, os.O_RDONLY | os.O_CLOEXEC)
    held.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StageError(f"another process is writing to {partial}") from error
    except OSError:
        pass  # not every file system can lock a folder


def clear(partial: Path, keep: Collection[str] = ()) -> None:
    """Remove everything but the manifest and the files `keep`."""
    for entry in partial.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name not in {manifest.NAME, *keep}:
            entry.unlink()


def put_in_place(folder: Path, finished: Manifest) -> None:
    """Flush the partial folder to disk, manifest last, and swap it for an earlier export."""
    partial, previous = partial_of(folder), _previous_of(folder)
    sync_tree(partial)
    finished.save(partial)
    sync(partial / manifest.NAME)
    sync(partial)
    if folder.exists():
        folder.replace(previous)
    partial.replace(folder)
    sync(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)
