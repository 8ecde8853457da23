"""Read the rows of text and JSON files one at a time."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pipeline.errors import DataError
from stages.data.files import JSON, PARQUET, TEXT
from stages.data.tokenize import Reading

UNREADABLE = (OSError, EOFError, zlib.error)
"""What reading a file raises when the disk fails or a .gz file is damaged."""
LARGEST_LINE = 64 << 20
"""Bytes; a longer line is not what anybody meant, and would be held in memory many times over."""
_HINT = "one JSON object a line; a .json file can also be one array of objects"
_SPACE = " \t\r\n"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a source. `number` counts from 1: lines of a text file, elements of a JSON array,
    rows of a table."""

    file: str | Path
    number: int
    value: Any

    def error(self, message: str, *, hint: str = "") -> DataError:
        """What is wrong with this row."""
        return DataError(message, file=self.file, row=self.number, hint=hint)


def rows(path: Path, reading: Reading, columns: list[str] | None = None) -> Iterator[Row]:
    """The rows of a file as dicts, whatever its kind; a line of a .txt file is {"text": line}.

    `columns` limits what is read of a table. Raises DataError for what is not such a row.
    """
    if path.name.endswith(PARQUET):
        from stages.data.tables import parquet_rows

        yield from parquet_rows(path, reading, columns)
    elif path.name.endswith(TEXT):
        for line in lines(path, reading):
            yield Row(file=path, number=line.number, value={"text": line.value})
    elif path.name.endswith(JSON) and _is_array(path):
        yield from _elements(path, reading)
    else:
        for line in lines(path, reading):
            yield Row(file=path, number=line.number, value=_object(line))


def lines(path: Path, reading: Reading) -> Iterator[Row]:
    """The lines of a UTF-8 file without their line ends; blank lines are left out.

    Raises DataError for bytes that are not UTF-8 text and for a file that cannot be read.
    """
    number = 0
    try:
        with path.open("rb") as raw, _unpacked(path, raw) as file:
            reading.enter(path.stat().st_size, raw.tell)
            while line := file.readline(LARGEST_LINE + 1):
                number += 1
                text = decode(_bounded(line, path, number), path, number).rstrip("\r\n")
                if text.strip():
                    yield Row(file=path, number=number, value=text)
    except UNREADABLE as error:
        raise DataError(f"cannot be read: {error}", file=path, row=number + 1) from error


def whole(path: Path) -> str:
    """A UTF-8 file's whole text. Raises DataError as `lines` does."""
    try:
        with path.open("rb") as raw, _unpacked(path, raw) as file:
            content = file.read()
    except UNREADABLE as error:
        raise DataError(f"cannot be read: {error}", file=path) from error
    return decode(content, path, 1)


def decode(raw: bytes, path: Path, first_line: int) -> str:
    """UTF-8 bytes, with or without byte order mark, as text; they begin at line `first_line`."""
    nul = raw.find(b"\0")
    if nul >= 0:
        raise DataError(
            f"a NUL byte at offset {nul}",
            file=path,
            row=first_line + raw.count(b"\n", 0, nul),
            hint="the file is no UTF-8 text, or was cut off while it was written",
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}",
            file=path,
            row=first_line + raw.count(b"\n", 0, error.start),
            hint="convert the file, for example with iconv",
        ) from error
    return text.removeprefix("\ufeff") if first_line == 1 else text


def _unpacked(path: Path, raw: IO[bytes]) -> IO[bytes]:
    packed = path.suffix == ".gz"
    return gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[return-value]


def _bounded(line: bytes, path: Path, number: int) -> bytes:
    if len(line) > LARGEST_LINE:
        raise DataError(
            f"a line of more than {LARGEST_LINE >> 20} MiB",
            file=path,
            row=number,
            hint="put every row on a line of its own, and split longer documents",
        )
    return line


def _object(line: Row) -> dict[str, Any]:
    try:
        value = json.loads(line.value)
    except (ValueError, RecursionError) as error:
        raise line.error(f"not JSON: {error}", hint=_HINT) from error
    return _as_object(line, value)


def _as_object(row: Row, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise row.error(f"is {kind(value)}, not an object", hint=_HINT)
    return value


def _is_array(path: Path) -> bool:
    """Whether a JSON file is one array rather than an object a line."""
    try:
        with path.open("rb") as raw, _unpacked(path, raw) as file:
            return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    except UNREADABLE as error:
        raise DataError(f"cannot be read: {error}", file=path) from error


def _elements(path: Path, reading: Reading) -> Iterator[Row]:
    """The elements of a JSON array. The text is held in memory, of what it says one element."""
    text = whole(path)
    at = 0
    size = path.stat().st_size
    reading.enter(size, lambda: size * at // max(len(text), 1))
    decoder = json.JSONDecoder()
    at, number = _skip(text, text.index("[") + 1), 0
    while not (text.startswith("]", at) and number == 0):
        row = Row(file=path, number=number + 1, value=None)
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise row.error(f"not JSON: {error}", hint=_HINT) from error
        number += 1
        yield Row(file=path, number=number, value=_as_object(row, value))
        at = _skip(text, at)
        if text.startswith("]", at):
            break
        if not text.startswith(",", at):
            raise row.error("the array is cut off behind this element")
        at = _skip(text, at + 1)
    if _skip(text, at + 1) != len(text):
        raise Row(file=path, number=number, value=None).error("more text behind the array")


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def require_text(row: Row, value: Any, what: str) -> str:
    """`value` if it is text that has a UTF-8 form; otherwise raises the row's error."""
    if not isinstance(value, str):
        raise row.error(f"{what} is {kind(value)}, not text")
    if "\0" in value:
        raise row.error(f"{what} holds a NUL character")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise row.error(f"{what} holds half of a surrogate pair") from error
    return value


_WORDS = {
    type(None): "missing", str: "text", bool: "true or false", int: "a number",
    float: "a number with a fraction", list: "a list", dict: "an object",
}  # fmt: skip


def kind(value: Any) -> str:
    """What a value is, in the words of JSON."""
    return _WORDS.get(type(value), f"a {type(value).__name__}")
