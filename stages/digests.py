"""Digests of files, read again only when they may have changed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import operator
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline import DataError
from pipeline.utils import cache_folder, replace_text

SETTLED = 60.0
"""Seconds. The digest of a file is not kept if the file was changed less than this before it was
read: a later change could get the same time stamp."""
_STAMP = operator.attrgetter("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino")


def digest(parts: object) -> str:
    """Return the hex SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def file_digests(paths: Sequence[Path]) -> list[str]:
    """Return the hex SHA-256 of the content of each file. Files that are new or have changed are
    read in threads; the digests of the others are known from an earlier call."""
    named = {str(path.absolute()): path for path in paths}
    record = cache_folder() / "digests" / f"{digest([*named])}.json"
    known, now = dict[str, Any](), time.time()
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # absent, or damaged
        kept = json.loads(record.read_text("utf-8"))
        known = kept["files"] if digest(kept["files"]) == kept["digest"] else {}

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        stats = pool.map(Path.stat, named.values())
        stamps = {name: [*_STAMP(found)] for name, found in zip(named, stats, strict=True)}
        new = [name for name, at in stamps.items() if known.get(name, [None])[0] != at]
        contents = pool.map(content_digest, (named[name] for name in new))
        read = {name: [stamps[name], content] for name, content in zip(new, contents, strict=True)}
    found: dict[str, list[Any]] = {name: read.get(name) or known[name] for name in named}
    settled = {
        name: [at, content]
        for name, (at, content) in found.items()
        if at == [*_STAMP(named[name].stat())] and max(at[1:3]) / 1e9 < now - SETTLED
    }
    if settled != known:
        text = json.dumps({"files": settled, "digest": digest(settled)})
        with contextlib.suppress(OSError):  # the files are read again next time
            record.parent.mkdir(parents=True, exist_ok=True)
            replace_text(record, text)
    return [found[str(path.absolute())][1] for path in paths]


def content_digest(path: Path) -> str:
    """Return the hex SHA-256 of a file's content. Raises DataError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", file=path) from error
