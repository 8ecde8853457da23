"""What a source consists of: files, or a split of a hub data set. Opened, told apart, read."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline.errors import StageError
from stages.data import files, rows
from stages.data.progress import Reading
from stages.data.rows import Row
from stages.data.selection import Source


class Part(Protocol):
    """Rows that are read one behind the other."""

    @property
    def name(self) -> str | Path:
        """What a person calls it."""
        ...

    @property
    def size(self) -> int:
        """Bytes of a file, rows of a hub data set."""
        ...

    def rows(self, reading: Reading, columns: list[str] | None = None) -> Iterator[Row]:
        """Every row. Raises DataError for one that cannot be read."""
        ...


@dataclass(frozen=True)
class FilePart:
    """One local file."""

    name: Path

    @property
    def size(self) -> int:
        return self.name.stat().st_size

    def rows(self, reading: Reading, columns: list[str] | None = None) -> Iterator[Row]:
        return rows.rows(self.name, reading, columns)


@dataclass(frozen=True)
class Opened:
    """A source whose parts are known."""

    source: Source
    parts: tuple[Part, ...]

    @functools.cached_property
    def digest(self) -> str:
        """Equal for equal contents: over the bytes of files; a hub data set's commit and split."""
        if self.source.dataset is None:
            return files.contents_digest([Path(part.name) for part in self.parts])
        return "/".join(str(part.name) for part in self.parts)

    def reading(self) -> Reading:
        """A new measure of how far reading has come."""
        return Reading(total=sum(part.size for part in self.parts))


def open_source(source: Source) -> Opened:
    """Find the source's parts. Raises StageError when there is nothing that can be read."""
    if source.dataset is not None:
        from stages.data.hub import hub_split

        parts: tuple[Any, ...] = (hub_split(source),)
        return Opened(source, parts)
    for problem in files.problems("files", source.files):
        raise StageError(problem.message, hint=problem.hint)
    return Opened(source, tuple(FilePart(path) for path in files.expand(source.files)))
