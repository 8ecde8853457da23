"""Rows of Parquet files and of data sets on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import DataError, StageError
from stages.data.rows import Row
from stages.data.tokenize import Reading


def parquet_rows(path: Path, reading: Reading, columns: list[str] | None) -> Iterator[Row]:
    """The rows of a Parquet file, or its `columns`. Raises DataError when it cannot be read, or
    holds a value that Python has none for."""
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
            _require_columns(path, table.schema_arrow.names, columns)
            count = max(table.metadata.num_rows, 1)
            reading.enter(size, lambda: size * number // count)
            for batch in table.iter_batches(batch_size=1024, columns=columns):
                for value in _values(path, batch, number):
                    number += 1
                    yield Row(file=path, number=number, value=filled(value))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"unreadable Parquet file: {error}", file=path, row=number + 1) from error


def _values(path: Path, batch: Any, before: int) -> Iterator[dict[str, Any]]:
    """The rows of a batch, which has `before` rows before it."""
    columns = [
        _column(path, name, column, before)
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    for values in zip(*columns, strict=True):
        yield dict(zip(batch.schema.names, values, strict=True))


def _column(path: Path, name: str, column: Any, before: int) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError) as error:  # text that is not UTF-8, a date out of range
        place = f"rows {before + 1} to {before + len(column)}"
        raise DataError(
            f"column {name!r} cannot be read in {place}: {error}",
            file=path,
            hint="correct the values, or leave the column out of the file",
        ) from error
    return values


def _require_columns(path: Path, known: list[str], columns: list[str] | None) -> None:
    for column in columns or ():
        if column not in known:
            raise DataError(f"no column {column!r}; it has {known}", file=path)


def filled(row: dict[str, Any]) -> dict[str, Any]:
    """A table's row without the nulls within its values: a column of objects holds one for every
    key that only other rows have."""
    return {key: _without_nulls(value) for key, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(child) for key, child in value.items() if child is not None}
    if isinstance(value, list):
        return [_without_nulls(child) for child in value]
    return value
