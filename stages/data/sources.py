"""Splits of data sets on the Hugging Face hub, through the `datasets` library."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline.errors import DataError, StageError
from stages.data import files, rows
from stages.data.fields import Source
from stages.data.rows import Row
from stages.data.tables import filled
from stages.data.tokenize import Reading
from stages.model.files import COMMIT


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
        parts: tuple[Any, ...] = (hub_split(source),)
        return Opened(source, parts)
    for problem in files.problems("files", source.files):
        raise StageError(problem.message, hint=problem.hint)
    return Opened(source, tuple(FilePart(path) for path in files.expand(source.files)))


@dataclass(frozen=True)
class HubSplit:
    """One split, at one commit, in the hub cache of this machine."""

    name: str
    table: Any
    """A `datasets.Dataset`."""

    @property
    def size(self) -> int:
        return len(self.table)

    def rows(self, reading: Reading, columns: list[str] | None = None) -> Iterator[Row]:
        missing = set(columns or ()) - set(self.table.column_names)
        if missing:
            known = self.table.column_names
            raise DataError(f"no column {sorted(missing)[0]!r}; it has {known}", file=self.name)
        table = self.table.select_columns(columns) if columns else self.table
        number = 0
        reading.enter(self.size, lambda: number)
        for value in table:
            number += 1
            yield Row(file=self.name, number=number, value=filled(value))


def hub_split(source: Source) -> HubSplit:
    """Download a split, or find it in the cache. Raises StageError when it cannot be had."""
    try:
        import datasets
    except ImportError as error:
        raise StageError(
            f"{source}: a hub data set needs the datasets library",
            hint="pip install 'pipetrain[data]'",
        ) from error
    try:
        commit = _commit(source)
        table = datasets.load_dataset(
            source.dataset, source.config, split=source.split, revision=commit
        )
    except Exception as error:  # from the network, the hub's parsing, or a split that is not there
        raise StageError(f"cannot get {source} from the hub: {_line(error)}") from error
    return HubSplit(f"{source}@{commit}", table)


def _commit(source: Source) -> str:
    """The commit that a branch or tag stands for now."""
    if source.revision is not None and COMMIT.fullmatch(source.revision):
        return source.revision
    from huggingface_hub import HfApi

    assert source.dataset is not None
    return str(HfApi().dataset_info(source.dataset, revision=source.revision).sha)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
