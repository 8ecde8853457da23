"""Digests of files, which are read again only when they may have changed.

A file's digest is kept with its size, its times and its number in the file system. Whoever writes
to it changes at least the time of its last change, which no user can set.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline.errors import DataError
from pipeline.files import replace_text
from stages.data.cache import default_folder, digest

SETTLED = 60.0
"""Seconds. A file that was changed later than that before it was read could change again at what
its file system takes for the same time; its digest is not kept."""

Stamp = list[int]


def file_digests(paths: Sequence[Path]) -> list[str]:
    """Hex SHA-256 of the content of each file. Files that must be read are read in threads."""
    names = [str(path.absolute()) for path in paths]
    place = default_folder() / "digests" / f"{digest(names)}.json"
    known, now = _kept(place), time.time()
    stamps = [_stamp(path) for path in paths]
    entries = {
        name: known[name]
        for name, stamp in zip(names, stamps, strict=True)
        if name in known and known[name][0] == stamp
    }
    changed = [number for number, name in enumerate(names) if name not in entries]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        contents = dict(zip(changed, pool.map(_content, (paths[n] for n in changed)), strict=True))
    for number in changed:
        if (
            stamps[number] == _stamp(paths[number])
            and max(stamps[number][1:3]) / 1e9 < now - SETTLED
        ):
            entries[names[number]] = (stamps[number], contents[number])
    if changed:
        _keep(place, entries)
    return [contents.get(number) or entries[name][1] for number, name in enumerate(names)]


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", file=path) from error
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _content(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", file=path) from error


def _kept(place: Path) -> dict[str, tuple[Stamp, str]]:
    """Digests that were kept earlier; none where they are damaged."""
    try:
        kept = json.loads(place.read_text("utf-8"))
        if digest(kept["files"]) != kept["digest"]:
            return {}
        return {name: (stamp, content) for name, (stamp, content) in kept["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _keep(place: Path, entries: dict[str, tuple[Stamp, str]]) -> None:
    """Where that is not possible, files are read again next time."""
    text = json.dumps({"files": entries, "digest": digest(entries)})
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_text(place, text)
