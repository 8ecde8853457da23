"""Find the files that fields name, and tell what is in them apart."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from pipeline.errors import Problem
from stages.data.cache import file_digests

TEXT = (".txt", ".txt.gz")
JSON_LINES = (".jsonl", ".jsonl.gz")
JSON = (".json", ".json.gz")
PARQUET = (".parquet",)
KNOWN = TEXT + JSON_LINES + JSON + PARQUET

Patterns = str | tuple[str, ...]


def expand(patterns: Patterns) -> list[Path]:
    """The files that paths and glob patterns name, in the order given; a pattern's in sorted order.

    A file comes once, however often it is named. Names that match nothing give nothing.
    """
    found: dict[Path, None] = {}
    for pattern in each(patterns):
        found.update(dict.fromkeys(_matches(pattern)))
    return list(found)


def each(patterns: Patterns) -> tuple[str, ...]:
    """The patterns one by one."""
    return (patterns,) if isinstance(patterns, str) else patterns


def _matches(pattern: str) -> list[Path]:
    expanded = os.path.expanduser(pattern)  # noqa: PTH111 (a pattern is not a path)
    if Path(expanded).is_file():
        return [Path(expanded)]
    names = sorted(glob.glob(expanded, recursive=True))  # noqa: PTH207 (absolute patterns)
    return [Path(name) for name in names if Path(name).is_file()]


def problems(key: str, patterns: Patterns) -> Iterator[Problem]:
    """Mistakes in a field of files that show without reading one."""
    if not each(patterns):
        yield Problem(message="no file is named", key=key)
    seen: set[Path] = set()
    for pattern in each(patterns):
        matches = _matches(pattern)
        if not matches:
            yield Problem(
                message=f"no such file: {pattern}",
                key=key,
                hint=f"paths are relative to the working directory, {Path.cwd()}",
            )
        for path in matches:
            if not path.name.endswith(KNOWN):
                hint = "known: " + " ".join(KNOWN)
                yield Problem(message=f"{path}: unknown kind of file", key=key, hint=hint)
            if path.resolve() in seen:
                yield Problem(message=f"{path} is named twice", key=key)
            seen.add(path.resolve())


def contents_digest(paths: Iterable[Path]) -> str:
    """Hex SHA-256 over the contents and kinds (not the names) of files, in order."""
    paths, total = list(paths), hashlib.sha256()
    for path, content in zip(paths, file_digests(paths), strict=True):
        total.update(f"{''.join(path.suffixes[-2:])}:{content}\n".encode())
    return total.hexdigest()
