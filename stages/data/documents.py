"""Documents of plain text, JSON and Parquet files, and of data sets on the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.errors import DataError
from stages.data.files import TEXT
from stages.data.parts import Part
from stages.data.progress import Reading
from stages.data.rows import Row, require_text, whole

Unit = Literal["file", "line"]


def _refuse(part: Part) -> None:
    raise DataError("no text in this file", file=part.name)


@dataclass(frozen=True, kw_only=True)
class DocumentReader:
    """Yields the documents of a source, in the order of its parts and rows."""

    text_key: str
    unit: Unit
    """What one document of a plain text file is."""
    blank: Callable[[Part], None] = _refuse
    """Called behind a part without text; by default it raises DataError."""

    def read(self, parts: Iterable[Part], reading: Reading) -> Iterator[str]:
        """Every document with text in it. Raises DataError for what cannot be read as one."""
        for part in parts:
            empty = True
            for document in self._part(part, reading):
                if document.strip():
                    empty = False
                    yield document
            if empty:
                self.blank(part)

    def _part(self, part: Part, reading: Reading) -> Iterator[str]:
        if not str(part.name).endswith(TEXT):
            return self._rows(part, reading)
        if self.unit == "line":
            return (row.value["text"] for row in part.rows(reading))
        return iter([whole(Path(part.name)).replace("\r\n", "\n")])

    def _rows(self, part: Part, reading: Reading) -> Iterator[str]:
        for row in part.rows(reading, [self.text_key]):
            yield require_text(row, self._value(row), f"{self.text_key!r}")

    def _value(self, row: Row) -> object:
        if self.text_key not in row.value:
            raise row.error(
                f"no key {self.text_key!r}; it has {sorted(row.value)}", hint="set `text_key`"
            )
        return row.value[self.text_key]
