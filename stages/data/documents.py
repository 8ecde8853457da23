"""Documents of plain text, JSON and Parquet files, and of data sets on the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipeline.contracts.data import NO_TARGET, Sample, Samples
from pipeline.errors import DataError
from stages.data import tokenize
from stages.data.cache import Counts
from stages.data.files import TEXT
from stages.data.rows import Row, require_text, whole
from stages.data.sources import Part
from stages.data.tokenize import Announcer, Reading

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stages.data.verified import VerifiedArray


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


TOKENS, STARTS = "tokens.bin", "starts.bin"
_LARGEST_CALL = 4_000_000


class TokenBlocks(Samples):
    """Windows of `length` + 1 tokens with stride `length`: every token but the first is one target.

    The last window is shorter when the stream does not fill it. `first` and `count` select a
    contiguous part of the windows. `starts`, where the documents begin in the stream, keeps them
    apart: positions begin anew with each, and nothing predicts its first token.
    """

    def __init__(
        self,
        tokens: NDArray[Any] | VerifiedArray,
        length: int,
        first: int = 0,
        count: int | None = None,
        *,
        starts: NDArray[Any] | None = None,
    ) -> None:
        self.tokens = tokens
        self._length = length
        self._first = first
        self._count = windows(len(tokens), length) - first if count is None else count
        self._starts = starts

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        start, stop = self._bounds(index)
        window = np.asarray(self.tokens[start:stop], dtype=np.int64)
        inputs, labels = window[:-1], window[1:]
        if self._starts is None:
            return Sample(input_ids=inputs, labels=labels)
        begin, end = self._documents(start, stop)
        borders = np.asarray(self._starts[begin:end], dtype=np.int64) - start
        labels = labels.copy()
        labels[borders - 1] = NO_TARGET
        return Sample(input_ids=inputs, labels=labels, positions=_positions(len(inputs), borders))

    def targets(self, index: int) -> int:
        start, stop = self._bounds(index)
        begin, end = self._documents(start, stop)
        return stop - start - 1 - (end - begin)

    def total_targets(self, indices: NDArray[np.int64]) -> int:
        starts = (self._first + require_within(indices, self._count)) * self._length
        stops = np.minimum(starts + self._length + 1, len(self.tokens))
        total = int((stops - starts - 1).sum())
        if self._starts is not None:
            begin = np.searchsorted(self._starts, starts, side="right")
            total -= int((np.searchsorted(self._starts, stops) - begin).sum())
        return total

    def _documents(self, start: int, stop: int) -> tuple[int, int]:
        """Which documents begin in a window behind its first token."""
        if self._starts is None:
            return 0, 0
        return (
            int(np.searchsorted(self._starts, start, side="right")),
            int(np.searchsorted(self._starts, stop)),
        )

    def _bounds(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self._count:
            raise IndexError(f"sample {index} of {self._count}")
        start = (self._first + index) * self._length
        return start, min(start + self._length + 1, len(self.tokens))


def require_within(indices: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The indices. Raises IndexError unless all of them are in [0, count)."""
    if len(indices) and not 0 <= indices.min() <= indices.max() < count:
        raise IndexError(f"samples {indices.min()} to {indices.max()} of {count}")
    return indices


def _positions(length: int, borders: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, 2, ... beginning anew at each border; shape (length,)."""
    began = np.zeros(length, dtype=np.int64)
    inside = borders[borders < length]
    began[inside] = inside
    return np.arange(length) - np.maximum.accumulate(began)


def windows(tokens: int, length: int) -> int:
    """How many samples with at least one target a stream of `tokens` tokens gives."""
    return max(0, -(-(tokens - 1) // length))


@dataclass(frozen=True, kw_only=True)
class TokenWriter:
    """Tokenises documents into one flat file, in memory bounded by the longest documents."""

    tokenizer: Any
    dtype: str
    prefix: list[int]
    """Ids before each document."""
    suffix: list[int]
    """Ids behind each document."""
    batch_documents: int
    workers: int | None
    announcer: Announcer

    def write(self, folder: Path, documents: Iterable[str]) -> Counts:
        """Write `tokens.bin`, and `starts.bin` with the place of the first token of each document
        that has one. Returns `documents`, `tokens` and `largest` (id)."""
        counts = {"documents": 0, "tokens": 0, "largest": 0}
        encoded = tokenize.each(self._ids, batches(documents, self.batch_documents), self.workers)
        with (folder / TOKENS).open("wb") as tokens, (folder / STARTS).open("wb") as starts:
            for _, (ids, lengths) in encoded:
                ids.tofile(tokens)
                (counts["tokens"] + _begins(lengths)).astype("<i8").tofile(starts)
                counts["documents"] += len(lengths)
                counts["tokens"] += len(ids)
                counts["largest"] = max(counts["largest"], int(ids.max(initial=0)))
                self.announcer.tell(counts["documents"], counts["tokens"])
        return counts

    def _ids(self, batch: list[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The documents' ids, one behind the other, and how many each has."""
        encoded = self.tokenizer(
            batch,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warning that a document is longer than the model's context
        )
        parts = [
            np.array([*self.prefix, *ids, *self.suffix], self.dtype) for ids in encoded["input_ids"]
        ]
        return np.concatenate(parts), np.array([len(part) for part in parts], np.int64)


def _begins(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where documents begin, but for those without a token; shape (documents with one,)."""
    return (np.cumsum(lengths) - lengths)[lengths > 0]


def batches(documents: Iterable[str], size: int) -> Iterator[list[str]]:
    """Documents in lists of at most `size`, and of a few million characters if none has more."""
    batch: list[str] = []
    characters = 0
    for document in documents:
        if batch and (len(batch) == size or characters + len(document) > _LARGEST_CALL):
            yield batch
            batch, characters = [], 0
        batch.append(document)
        characters += len(document)
    if batch:
        yield batch
