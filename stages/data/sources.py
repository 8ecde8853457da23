"""Data files: find them, and read rows and documents from them one at a time."""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pipeline.errors import DataError, Problem, StageError

TEXT = (".txt", ".txt.gz")
JSON_LINES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
PARQUET = (".parquet",)

UNREADABLE = (OSError, EOFError, zlib.error)
"""What reading a file raises when the disk fails or a .gz file is damaged."""

Patterns = str | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a data file. `number` counts from 1: lines of a text file, rows of a table."""

    file: Path
    number: int
    value: Any

    def error(self, message: str, *, hint: str = "") -> DataError:
        """What is wrong with this row."""
        return DataError(message, file=self.file, row=self.number, hint=hint)


def expand(patterns: Patterns) -> list[Path]:
    """The files that paths and glob patterns name, in the order given; a pattern's in sorted order.

    A file that is named twice counts once. Names that match nothing give nothing.
    """
    found: dict[Path, None] = {}
    for pattern in _each(patterns):
        found.update(dict.fromkeys(_matches(pattern)))
    return list(found)


def _each(patterns: Patterns) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else patterns


def _matches(pattern: str) -> list[Path]:
    expanded = os.path.expanduser(pattern)  # noqa: PTH111 (a pattern is not a path)
    if Path(expanded).is_file():
        return [Path(expanded)]
    names = sorted(glob.glob(expanded, recursive=True))  # noqa: PTH207 (absolute patterns)
    return [Path(name) for name in names if Path(name).is_file()]


def problems(key: str, patterns: Patterns, suffixes: tuple[str, ...]) -> Iterator[Problem]:
    """Mistakes in a stage's file field that show without reading a file."""
    if not _each(patterns):
        yield Problem(message="no file is named", key=key)
    for pattern in _each(patterns):
        matches = _matches(pattern)
        if not matches:
            yield Problem(
                message=f"no such file: {pattern}",
                key=key,
                hint=f"paths are relative to the working directory, {Path.cwd()}",
            )
        for path in matches:
            if not path.name.endswith(suffixes):
                yield Problem(
                    message=f"{path}: unknown kind of file",
                    key=key,
                    hint="known: " + " ".join(suffixes),
                )


def require(patterns: Patterns, suffixes: tuple[str, ...]) -> list[Path]:
    """`expand`, or StageError when there is nothing to read or something that cannot be read."""
    for problem in problems("files", patterns, suffixes):
        raise StageError(problem.message, hint=problem.hint)
    return expand(patterns)


def contents_digest(paths: Iterable[Path]) -> str:
    """Hex SHA-256 over the contents and kinds (not the names) of files, in order."""
    total = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", file=path) from error
        total.update(f"{''.join(path.suffixes[-2:])}:{content}\n".encode())
    return total.hexdigest()


def open_binary(path: Path) -> IO[bytes]:
    """A file's bytes, unpacked when its name ends in .gz."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return path.open("rb")


def lines(path: Path) -> Iterator[Row]:
    """The lines of a UTF-8 file without their line ends; blank lines are left out.

    Raises DataError for bytes that are not UTF-8 and for a file that cannot be read.
    """
    number = 0
    try:
        with open_binary(path) as file:
            for number, raw in enumerate(file, start=1):
                text = decode(raw, path, number).rstrip("\r\n")
                if text.strip():
                    yield Row(file=path, number=number, value=text)
    except UNREADABLE as error:
        raise DataError(f"cannot be read: {error}", file=path, row=number + 1) from error


def decode(raw: bytes, path: Path, first_line: int) -> str:
    """UTF-8 bytes, with or without byte order mark, as text; they begin at line `first_line`."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        raise DataError(
            f"not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}",
            file=path,
            row=line,
            hint="convert the file, for example with iconv",
        ) from error
    return text.removeprefix("\ufeff") if first_line == 1 else text


def objects(path: Path, columns: list[str] | None = None) -> Iterator[Row]:
    """The rows of a JSON-lines or Parquet file as dicts; `columns` limits what is read of a table.

    Raises DataError for a line that is not a JSON object and for an unreadable table.
    """
    if path.name.endswith(PARQUET):
        yield from _table(path, columns)
        return
    for line in lines(path):
        yield Row(file=path, number=line.number, value=_object(line))


def _object(line: Row) -> dict[str, Any]:
    try:
        value = json.loads(line.value)
    except (ValueError, RecursionError) as error:
        hint = "one JSON object a line"
        raise line.error(f"not JSON: {error}", hint=hint) from error
    if not isinstance(value, dict):
        raise line.error(f"a {type(value).__name__}, not an object", hint="one JSON object a line")
    return value


def _table(path: Path, columns: list[str] | None) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise StageError(
            f"{path}: reading Parquet needs pyarrow", hint="pip install 'pipetrain[data]'"
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as table:
            known = table.schema_arrow.names
            for column in columns or ():
                if column not in known:
                    raise DataError(f"no column {column!r}; it has {known}", file=path)
            for batch in table.iter_batches(batch_size=1024, columns=columns):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(file=path, number=number, value=value)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"unreadable Parquet file: {error}", file=path, row=number + 1) from error


def require_text(row: Row, value: Any, what: str) -> str:
    """`value` if it is text that has a UTF-8 form; otherwise raises the row's error."""
    if not isinstance(value, str):
        raise row.error(f"{what} is {_kind(value)}, not text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise row.error(f"{what} holds half of a surrogate pair") from error
    return value


def _kind(value: Any) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"
