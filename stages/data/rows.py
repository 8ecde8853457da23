"""Rows of text, JSON and Parquet files, read one at a time."""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pipeline import DataError
from pipeline.utils import optional

TEXT = (".txt", ".txt.gz")
JSON_LINES = (".jsonl", ".jsonl.gz")
JSON = (".json", ".json.gz")
PARQUET = (".parquet",)
KNOWN = TEXT + JSON_LINES + JSON + PARQUET

Report = Callable[[DataError], object]
"""Takes a row that cannot be read; raises, or returns to continue with the next."""

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
    form: str = ""
    """Its form, one of `forms.KEYS`, once that is known."""
    nulls: str = ""
    """Place of the first null that was removed from what a template would be given."""

    def error(self, message: str, *, hint: str = "") -> DataError:
        """Return an error that names this row."""
        return DataError(message, file=self.file, row=self.number, hint=hint)


def raised(error: DataError) -> None:
    """Raise an error: the report that ends with the first mistake."""
    raise error


def rows(path: Path, columns: list[str] | None = None, report: Report = raised) -> Iterator[Row]:
    """Yield the rows of a file of any known kind as dicts; a line of a .txt file as {"text": line}.
    `columns` limits what is read of a Parquet file. `report` gets a DataError for each row that is
    not an object, or holds a key twice. Raises DataError for a file that cannot be read."""
    if path.name.endswith(PARQUET):
        needs = f"{path}: reading Parquet needs pyarrow"
        with optional(needs, hint="pip install 'pipetrain[data]'"):
            import pyarrow
            import pyarrow.parquet as parquet
        number = 0
        try:
            with parquet.ParquetFile(path) as table:
                require_columns(path, table.schema_arrow.names, columns)
                for batch in table.iter_batches(batch_size=1024, columns=columns):
                    for value in batch.to_pylist():
                        number += 1
                        yield Row(file=path, number=number, value=value)
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            message = f"unreadable Parquet file: {error}"
            raise DataError(message, file=path, row=number + 1) from error
    elif path.name.endswith(TEXT):
        for line in _lines(path, report):
            yield Row(file=path, number=line.number, value={"text": line.value})
    elif path.name.endswith(JSON) and _is_array(path):
        # Unlike lines, the elements are in memory all at once.
        values, repeats = _decoded(Row(file=path, number=1, value=None), read_text(path))
        found = (Row(file=path, number=number, value=each) for number, each in enumerate(values, 1))
        check = _require_once if repeats else lambda row, value: value
        yield from _objects(found, report, check)
    else:
        yield from _objects(_lines(path, report), report, parsed_json)


def read_text(path: Path) -> str:
    """Return the whole text of a UTF-8 file. Raises DataError if it cannot be read or decoded."""
    with _opened(path, lambda: None) as file:
        content = file.read()
    return _decode(content, path, 1)


@contextlib.contextmanager
def _opened(path: Path, row: Callable[[], int | None]) -> Iterator[IO[bytes]]:
    """Open a file, decompressed. Raises DataError for the current row where that fails."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield file  # type: ignore[misc]
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot be read: {error}", file=path, row=row()) from error


def _lines(path: Path, report: Report) -> Iterator[Row]:
    """Yield the lines of a UTF-8 file that are not blank, without their line ends."""
    number = 0
    with _opened(path, lambda: number + 1) as file:
        while line := file.readline(LARGEST_LINE + 1):
            number += 1
            if len(line) > LARGEST_LINE:
                message = f"a line of more than {LARGEST_LINE >> 20} MiB"
                hint = "put each row on its own line, and split longer documents"
                report(DataError(message, file=path, row=number, hint=hint))
                while line and not line.endswith(b"\n"):
                    line = file.readline(LARGEST_LINE)
                continue
            try:
                text = _decode(line, path, number).rstrip("\r\n")
            except DataError as error:
                report(error)
                continue
            begins_an_array = text.replace(" ", "") in ("[", "[{")
            if number == 1 and path.name.endswith(JSON_LINES) and begins_an_array:
                hint = "give it the ending .json, or write one object a line"
                raise DataError("the file is one JSON array", file=path, row=number, hint=hint)
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


def _objects(
    found: Iterable[Row], report: Report, value_of: Callable[[Row, Any], Any]
) -> Iterator[Row]:
    """Yield rows whose value is a JSON object."""
    for row in found:
        try:
            value = value_of(row, row.value)
            if not isinstance(value, dict):
                raise row.error(f"is {kind(value)}, not an object", hint=_HINT)
        except DataError as error:
            report(error)
        else:
            yield Row(file=row.file, number=row.number, value=value)


@dataclass(frozen=True)
class _Repeat:
    """Stands for an object that has a key twice."""

    key: str


def parsed_json(row: Row, value: Any, what: str = "") -> Any:
    """Return the value of a JSON text in a row, or another value as it is; `what` names it unless
    it is the whole row. Raises the row's error if the text is not JSON, or has an object with a key
    twice."""
    value, repeats = _decoded(row, value, what) if isinstance(value, str) else (value, False)
    return _require_once(row, value, what) if repeats else value


def _decoded(row: Row, text: str, what: str = "") -> tuple[Any, bool]:
    """Return the value of a JSON text, and whether a _Repeat stands for an object within it."""
    repeats = list[_Repeat]()

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Repeat:
        found = dict(pairs)
        if len(found) == len(pairs):
            return found
        keys = [key for key, _ in pairs]
        repeats.append(_Repeat(next(key for key in keys if keys.count(key) > 1)))
        return repeats[-1]

    try:
        return json.loads(text, object_pairs_hook=once), bool(repeats)
    except json.JSONDecodeError as error:
        # Rows are lines, so only the file of an array has further ones.
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        place, rest = f"at {line}column {error.colno}", error.doc[error.pos :].strip()
        message, mark = f"not JSON: {error.msg} {place}", " is "
        if error.msg == "Extra data":
            before = {"{": "object", "[": "list"}.get(error.doc.lstrip()[:1], "value")
            comma = " (a trailing comma?)" if rest == "," else ""
            message, mark = f"text after the {before}, {place}{comma}", ": "
        cause: Exception = error
    except (ValueError, RecursionError) as error:
        message, mark, cause = f"not JSON: {error}", " is ", error
    if what:
        raise row.error(f"`{what}`{mark}{message}") from cause
    hint = _HINT
    if text.lstrip()[:2] in ("{'", "{\u2018", "{\u201c"):
        hint = 'keys and texts of JSON have double quotes ("); write rows with json.dumps'
    raise row.error(message, hint=hint) from cause


def _require_once(row: Row, value: Any, place: str = "") -> Any:
    """Return the value, which is at `place`. Raises the row's error if a _Repeat is within it."""
    left = [(place, value)]
    while left:
        at, found = left.pop()
        if isinstance(found, _Repeat):
            where = f"`{at}` has" if at else "has"
            hint = "leave out the one that is not meant"
            raise row.error(f"{where} the key {found.key!r} twice", hint=hint)
        left += reversed(list(children(at, found)))
    return value


def children(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values directly within an object or a list, with their places."""
    if isinstance(value, dict):
        yield from ((f"{place}.{key}".removeprefix("."), each) for key, each in value.items())
    elif isinstance(value, list):
        yield from ((f"{place}[{index}]", each) for index, each in enumerate(value))


def _is_array(path: Path) -> bool:
    """Whether a JSON file is one array rather than an object a line."""
    with _opened(path, lambda: None) as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def require_columns(file: str | Path, known: list[str], columns: list[str] | None) -> None:
    """Raise DataError if a table lacks one of `columns`."""
    for column in columns or ():
        if column not in known:
            raise DataError(f"no column {column!r}; it has {known}", file=file)


def require(row: Row, value: Any, kind_: type, what: str, words: str = "") -> Any:
    """Return `value` if it is of the given JSON type (`words` if set); raise the row's error, which
    calls it `what`, otherwise."""
    if not isinstance(value, kind_):
        wanted = "" if value is None else f", not {words or _WORDS[kind_]}"
        raise row.error(f"{what} is {kind(value)}{wanted}")
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
