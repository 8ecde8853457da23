"""Files of one JSON object a line that survive a writer that was killed in the middle of a line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.utils.files import naming, opened
from pipeline.utils.foreign import lines_of, open_regular, parse_json

TAIL_BYTES = 1 << 16


def append_line(path: Path, record: Mapping[str, Any], *, sync: bool = False) -> None:
    """Add a record; it is with the system when this returns, and on disk if `sync`.

    A line that an earlier writer left unfinished is ended first, so that it spoils only itself.
    """
    with naming(path), opened(path, "ab+") as file:
        if _ends_in_midline(file):
            file.write(b"\n")
        file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        file.flush()
        if sync:
            os.fsync(file.fileno())


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records in order; none if there is no file. A line that is not whole, or longer than
    16 MiB, is passed over. Raises OSError for anything else than a file in its folder."""
    if path.exists():
        with open_regular(path, within=path.parent) as file:
            yield from _parsed(file)


def read_tail(path: Path) -> list[dict[str, Any]]:
    """The records of the file's last 64 KiB, which takes no longer for a long file."""
    if not path.exists():
        return []
    with open_regular(path, within=path.parent) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        return list(_parsed(file))


def _ends_in_midline(file: Any) -> bool:
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return bool(file.read(1) != b"\n")


def _parsed(file: BinaryIO) -> Iterator[dict[str, Any]]:
    for line in lines_of(file):
        try:
            record = parse_json(line)
        except ValueError:  # not JSON, or not UTF-8
            continue
        if isinstance(record, dict):
            yield record
