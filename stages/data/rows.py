"""Rows of text, JSON and Parquet files, read one at a time."""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pipeline import DataError, StageError

TEXT = (".txt", ".txt.gz")
JSON_LINES = (".jsonl", ".jsonl.gz")
JSON = (".json", ".json.gz")
PARQUET = (".parquet",)
KNOWN = TEXT + JSON_LINES + JSON + PARQUET

LARGEST_LINE = 64 << 20
"""Bytes. A longer line is a mistake, and would be held in memory many times over."""
_HINT = "one JSON object a line; a .json file can also be one array of objects"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a source. `number` counts from 1: lines of a text file, elements of a JSON array,
    rows of a table."""

    file: str | Path
    number: int
    value: Any

    def error(self, message: str, *, hint: str = "") -> DataError:
        """Return an error that names this row."""
        return DataError(message, file=self.file, row=self.number, hint=hint)


@dataclass(kw_only=True)
class Reading:
    """Position of a reader in its source. Sizes are bytes of files, or rows of a hub data set."""

    total: int = 0
    """Size of the whole source; 0 if it is unknown."""
    _before: int = field(default=0, init=False)
    _size: int = field(default=0, init=False)
    _position: Callable[[], int] = field(default=lambda: 0, init=False)

    def enter(self, size: int, position: Callable[[], int]) -> None:
        """Begin a part of this size; `position` returns how much of it has been read."""
        self._before += self._size
        self._size, self._position = size, position

    def fraction(self) -> float | None:
        """Return the share that has been read, 0 to 1; None if the total is unknown."""
        if not self.total:
            return None
        return min(1.0, (self._before + self._position()) / self.total)


def rows(path: Path, reading: Reading, columns: list[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a file of any known kind as dicts; a line of a .txt file as {"text": line}.

    `columns` limits what is read of a Parquet file. Raises DataError for a row that is not an
    object, and for a file that cannot be read.
    """
    if path.name.endswith(PARQUET):
        yield from _parquet_rows(path, reading, columns)
    elif path.name.endswith(TEXT):
        for line in _lines(path, reading):
            yield Row(file=path, number=line.number, value={"text": line.value})
    elif path.name.endswith(JSON) and _is_array(path):
        yield from _elements(path, reading)
    else:
        for line in _lines(path, reading):
            with _json_errors(line):
                value = json.loads(line.value)
            yield Row(file=path, number=line.number, value=_require_object(line, value))


def read_text(path: Path) -> str:
    """Return the whole text of a UTF-8 file. Raises DataError if it cannot be read or decoded."""
    with _opened(path, lambda: None) as (_, file):
        content = file.read()
    return _decode(content, path, 1)


@contextlib.contextmanager
def _opened(path: Path, row: Callable[[], int | None]) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file: as it is, and decompressed. Raises DataError, which names the current row, for
    a failing disk or a damaged .gz file."""
    try:
        with path.open("rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            yield raw, file  # type: ignore[misc]
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot be read: {error}", file=path, row=row()) from error


def _lines(path: Path, reading: Reading) -> Iterator[Row]:
    """Yield the lines of a UTF-8 file that are not blank, without their line ends."""
    number = 0
    with _opened(path, lambda: number + 1) as (raw, file):
        reading.enter(path.stat().st_size, raw.tell)
        while line := file.readline(LARGEST_LINE + 1):
            number += 1
            if len(line) > LARGEST_LINE:
                message = f"a line of more than {LARGEST_LINE >> 20} MiB"
                hint = "put every row on a line of its own, and split longer documents"
                raise DataError(message, file=path, row=number, hint=hint)
            text = _decode(line, path, number).rstrip("\r\n")
            if text.strip():
                yield Row(file=path, number=number, value=text)


def _decode(raw: bytes, path: Path, first_line: int) -> str:
    """Decode UTF-8 bytes, with or without byte order mark, that begin at line `first_line`."""
    try:
        at = raw.find(b"\0")
        message = f"a NUL byte at offset {at}"
        hint = "the file is not UTF-8 text, or was cut off while it was written"
        if at < 0:
            text = raw.decode("utf-8")
            return text.removeprefix("\ufeff") if first_line == 1 else text
    except UnicodeDecodeError as error:
        at = error.start
        message = f"not UTF-8: byte 0x{raw[at]:02x} at offset {at}"
        hint = "convert the file, for example with iconv"
    row = first_line + raw.count(b"\n", 0, at)
    raise DataError(message, file=path, row=row, hint=hint)


@contextlib.contextmanager
def _json_errors(row: Row) -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise row.error(f"not JSON: {error}", hint=_HINT) from error


def _require_object(row: Row, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise row.error(f"is {kind(value)}, not an object", hint=_HINT)
    return value


def _is_array(path: Path) -> bool:
    """Whether a JSON file is one array rather than an object a line."""
    with _opened(path, lambda: None) as (_, file):
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _elements(path: Path, reading: Reading) -> Iterator[Row]:
    """Yield the elements of a JSON array. The text is in memory, parsed one element at a time."""
    text = read_text(path)
    size, decoder = path.stat().st_size, json.JSONDecoder()
    at, number = _skip(text, text.index("[") + 1), 0
    reading.enter(size, lambda: size * at // max(len(text), 1))
    while not (text.startswith("]", at) and number == 0):
        number += 1
        row = Row(file=path, number=number, value=None)
        with _json_errors(row):
            value, at = decoder.raw_decode(text, at)
        yield Row(file=path, number=number, value=_require_object(row, value))
        at = _skip(text, at)
        if text.startswith("]", at):
            break
        if not text.startswith(",", at):
            raise row.error("the array is cut off behind this element")
        at = _skip(text, at + 1)
    if _skip(text, at + 1) != len(text):
        raise Row(file=path, number=number, value=None).error("more text behind the array")


def _skip(text: str, at: int) -> int:
    """Return the index of the next character that is not white space."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _parquet_rows(path: Path, reading: Reading, columns: list[str] | None) -> Iterator[Row]:
    """Yield the rows of a Parquet file. Raises DataError if it cannot be read, lacks a column, or
    holds a value that Python cannot represent."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise StageError(
            f"{path}: reading Parquet needs pyarrow", hint="pip install 'pipetrain[data]'"
        ) from error
    number = 0
    size = path.stat().st_size
    try:
        with parquet.ParquetFile(path) as table:
            require_columns(path, table.schema_arrow.names, columns)
            count = max(table.metadata.num_rows, 1)
            reading.enter(size, lambda: size * number // count)
            for batch in table.iter_batches(batch_size=1024, columns=columns):
                names = batch.schema.names
                values = [
                    _column(path, *each, number) for each in zip(names, batch.columns, strict=True)
                ]
                for value in zip(*values, strict=True):
                    number += 1
                    row = without_nulls(dict(zip(names, value, strict=True)))
                    yield Row(file=path, number=number, value=row)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"unreadable Parquet file: {error}", file=path, row=number + 1) from error


def _column(path: Path, name: str, column: Any, before: int) -> list[Any]:
    """Return the values of one column of a batch that begins behind row `before`."""
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError) as error:  # text that is not UTF-8, a date out of range
        place = f"in rows {before + 1} to {before + len(column)}"
        hint = "correct the values, or leave the column out of the file"
        message = f"column {name!r} cannot be read {place}: {error}"
        raise DataError(message, file=path, hint=hint) from error
    return values


def require_columns(file: str | Path, known: list[str], columns: list[str] | None) -> None:
    """Raise DataError if a table lacks one of `columns`."""
    for column in columns or ():
        if column not in known:
            raise DataError(f"no column {column!r}; it has {known}", file=file)


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Return a table's row without the nulls within its values: tables give every object of a
    column all the keys that any row has."""
    return {key: _without_nulls(value) for key, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(child) for key, child in value.items() if child is not None}
    if isinstance(value, list):
        return [_without_nulls(child) for child in value]
    return value


def require(row: Row, value: Any, kind_: type, what: str, words: str = "") -> Any:
    """Return `value` if it is of the given JSON type (`words` if set); raise the row's error, which
    calls it `what`, otherwise."""
    if not isinstance(value, kind_):
        raise row.error(f"{what} is {kind(value)}, not {words or _WORDS[kind_]}")
    return value


def require_text(row: Row, value: Any, what: str) -> str:
    """Return `value` if it is text that UTF-8 can encode; raise the row's error otherwise."""
    text: str = require(row, value, str, what)
    if "\0" in text:
        raise row.error(f"{what} holds a NUL character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise row.error(f"{what} holds half of a surrogate pair") from error
    return text


_WORDS = {
    type(None): "missing", str: "text", bool: "true or false", int: "a number",
    float: "a number with a fraction", list: "a list", dict: "an object",
}  # fmt: skip


def kind(value: Any) -> str:
    """Return the name that JSON has for the type of a value."""
    return _WORDS.get(type(value), f"a {type(value).__name__}")
