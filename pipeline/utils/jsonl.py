"""Files of one JSON object a line that survive a writer that was killed in the middle of a line."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.utils.files import naming, opened
from pipeline.utils.foreign import lines_of, open_regular, parse_json

TAIL_BYTES = 1 << 16


def append_line(path: Path, record: Mapping[str, Any], *, sync: bool = False) -> None:
    """Add a record; it is with the system when this returns, and on disk if `sync`.

    A line that an earlier writer left unfinished is ended first, so that it spoils only itself.
    """
    with naming(path), opened(path, "ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
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
            yield from _parsed(lines_of(file))


def read_tail(path: Path) -> list[dict[str, Any]]:
    """The records of the file's last 64 KiB, which takes no longer for a long file."""
    if not path.exists():
        return []
    with open_regular(path, within=path.parent) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        return list(_parsed(lines_of(file)))


def _parsed(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with contextlib.suppress(ValueError):  # not JSON, or not UTF-8
            record = parse_json(line)
            if isinstance(record, dict):
                yield record


@dataclass
class Tail:
    """Reads what is new in a file since the last call.

    A resumed run replaces `metrics.jsonl` by a shorter file: then `replaced` is true, and all of it
    is new again.
    """

    path: Path
    newest_bytes: int | None = None
    """Begin this many bytes before the end of a longer file; None begins at its start."""
    replaced: bool = field(default=False, init=False)
    """Whether the newest records begin a file that replaces the one before."""
    whole: bool = field(default=True, init=False)
    """Whether the file was read from its start."""
    _offset: int = field(default=0, init=False)
    _file: int | None = field(default=None, init=False)
    """Inode number of the file that `_offset` is of."""

    @property
    def began(self) -> bool:
        """Whether there has been a file."""
        return self._file is not None

    def read(self) -> list[dict[str, Any]]:
        """Return the complete records that are new; none if there is no file. A line that is not
        a JSON object is passed over, and one without an end is read when it has one. Raises
        OSError."""
        self.replaced = False
        try:
            file = open_regular(self.path, within=self.path.parent)
        except FileNotFoundError:
            return []
        with file:
            facts = os.fstat(file.fileno())
            if self._file is None:
                self._offset = max(0, facts.st_size - (self.newest_bytes or facts.st_size))
                self.whole = self._offset == 0
            elif facts.st_ino != self._file or facts.st_size < self._offset:
                self.replaced, self.whole, self._offset = True, True, 0
            self._file = facts.st_ino
            file.seek(self._offset)
            found: list[dict[str, Any]] = []
            for line in lines_of(file):
                if line.endswith(b"\n"):
                    self._offset = file.tell()
                    found += _parsed([line])
            return found
