"""Follow a file of one JSON object a line that another process appends to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.utils.foreign import lines_of, open_regular, parse_json


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
        """Return the complete records that are new; none if there is no file. A line that is no
        JSON object is passed over, and one without an end is read when it has one. Raises
        OSError."""
        self.replaced = False
        try:
            with open_regular(self.path, within=self.path.parent) as file:
                self._follow(os.fstat(file.fileno()))
                file.seek(self._offset)
                return list(self._records(file))
        except FileNotFoundError:
            return []

    def _records(self, file: BinaryIO) -> Iterator[dict[str, Any]]:
        for line in lines_of(file):
            if line.endswith(b"\n"):
                self._offset = file.tell()
                record = _parsed(line)
                if record is not None:
                    yield record

    def _follow(self, facts: os.stat_result) -> None:
        """Begin again where another file, or a shorter one, has taken the path."""
        if self._file is not None and (facts.st_ino != self._file or facts.st_size < self._offset):
            self.replaced, self.whole, self._offset = True, True, 0
        elif self._file is None and self.newest_bytes is not None:
            self._offset = max(0, facts.st_size - self.newest_bytes)
            self.whole = self._offset == 0
        self._file = facts.st_ino


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(line)
    except ValueError:  # not JSON, or not UTF-8
        return None
    return record if isinstance(record, dict) else None
