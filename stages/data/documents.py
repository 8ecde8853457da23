"""Documents of plain text, JSON-lines and Parquet files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.errors import DataError
from stages.data.sources import (
    TEXT,
    UNREADABLE,
    Row,
    decode,
    lines,
    objects,
    open_binary,
    require_text,
)

Unit = Literal["file", "line"]


@dataclass(frozen=True, kw_only=True)
class DocumentReader:
    """Yields the documents of files, in the order of files and rows."""

    text_key: str
    unit: Unit
    """What one document of a plain text file is."""

    def read(self, paths: Iterable[Path]) -> Iterator[str]:
        """Every document with text in it. Raises DataError for what cannot be read as one."""
        for path in paths:
            empty = True
            for document in self._file(path):
                if document.strip():
                    empty = False
                    yield document
            if empty:
                raise DataError("no text in this file", file=path)

    def _file(self, path: Path) -> Iterator[str]:
        if not path.name.endswith(TEXT):
            return self._rows(path)
        if self.unit == "line":
            return (line.value for line in lines(path))
        return _whole(path)

    def _rows(self, path: Path) -> Iterator[str]:
        for row in objects(path, [self.text_key]):
            yield require_text(row, self._value(row), f"{self.text_key!r}")

    def _value(self, row: Row) -> object:
        if self.text_key not in row.value:
            raise row.error(
                f"no key {self.text_key!r}; it has {sorted(row.value)}", hint="set `text_key`"
            )
        return row.value[self.text_key]


def _whole(path: Path) -> Iterator[str]:
    try:
        with open_binary(path) as file:
            raw = file.read()
    except UNREADABLE as error:
        raise DataError(f"cannot be read: {error}", file=path) from error
    yield decode(raw, path, 1).replace("\r\n", "\n")
