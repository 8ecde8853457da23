"""Samples in cache entries: rows with a mask of their targets, and blocks of a token stream."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from pipeline.contracts.data import NO_TARGET, Sample, Samples
from pipeline.errors import StageError
from stages.data.cache import Counts, Entry, VerifiedArray
from stages.data.encode import Dropped, Encoded
from stages.data.formats import Format
from stages.data.rows import Row
from stages.data.tokenize import ProgressLog

if TYPE_CHECKING:
    import logging

    from numpy.typing import NDArray

TOKENS, STARTS = "tokens.bin", "starts.bin"
_TRAINED, _OFFSETS, _TARGETS = "trained.bin", "offsets.bin", "targets.bin"
FORM = "form "
"""Prefix of the counts of an entry's rows by format."""
_ROWS_SHOWN = 5


def require_index(index: int, count: int) -> int:
    """Return the index. Raises IndexError unless it is in [0, count)."""
    if not 0 <= index < count:
        raise IndexError(f"sample {index} of {count}")
    return index


def require_indices(indices: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the indices. Raises IndexError unless all of them are in [0, count)."""
    if len(indices) and not 0 <= indices.min() <= indices.max() < count:
        raise IndexError(f"samples {indices.min()} to {indices.max()} of {count}")
    return indices


class MaskedSamples(Samples):
    """Samples `first` ... `first` + `count` - 1 of a cache entry that SampleWriter wrote."""

    def __init__(self, entry: Entry, dtype: str, first: int, count: int) -> None:
        self._tokens = entry.array(TOKENS, dtype)
        self._trained = entry.array(_TRAINED, "u1")
        self._offsets = entry.array(_OFFSETS, "<i8")[:]
        self._targets = entry.array(_TARGETS, "<i4")[:]
        self._first = first
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        row = self._first + require_index(index, self._count)
        start, stop = int(self._offsets[row]), int(self._offsets[row + 1])
        ids = np.asarray(self._tokens[start:stop], dtype=np.int64)
        labels = np.where(self._trained[start + 1 : stop] != 0, ids[1:], NO_TARGET)
        return Sample(input_ids=ids[:-1], labels=labels)

    def targets(self, index: int) -> int:
        return int(self._targets[self._first + require_index(index, self._count)])

    def total_targets(self, indices: NDArray[np.int64]) -> int:
        return int(self._targets[self._first + require_indices(indices, self._count)].sum())

    def lengths(self) -> NDArray[np.int64]:
        """Return the number of `input_ids` of each sample; shape (samples,)."""
        offsets = self._offsets[self._first : self._first + self._count + 1]
        return np.asarray(offsets[1:] - offsets[:-1] - 1, dtype=np.int64)

    def all_targets(self) -> NDArray[np.int64]:
        """Return the `targets` of every sample; shape (samples,)."""
        targets = self._targets[self._first : self._first + self._count]
        return np.asarray(targets, dtype=np.int64)


@dataclass
class DroppedRows:
    """The number of rows that were dropped for one reason, and the first of them."""

    count: int = 0
    first: list[str] = field(default_factory=list)
    """Places as file:row."""

    def add(self, row: Row) -> None:
        """Count one more row."""
        self.count += 1
        if len(self.first) < _ROWS_SHOWN:
            self.first.append(f"{row.file}:{row.number}")

    def __str__(self) -> str:
        return ", ".join([*self.first, "..."] if self.count > len(self.first) else self.first)


@dataclass(kw_only=True)
class SampleWriter:
    """Writes encoded rows as the files of MaskedSamples."""

    dtype: str
    log: logging.Logger
    progress: ProgressLog
    _counts: Counts = field(init=False)
    _dropped: dict[str, DroppedRows] = field(init=False, default_factory=dict)
    """Dropped rows by reason."""

    def write(
        self,
        folder: Path,
        batches: Iterable[tuple[Sequence[tuple[Format, Row]], Sequence[Encoded | Dropped]]],
    ) -> Counts:
        """Write batches of rows with their tokens. Returns `rows`, `samples`, `tokens`, `targets`,
        `largest` (id), `long` (rows that were truncated or dropped), `dropped`, and the rows of
        each format.

        Raises StageError if every row is dropped.
        """
        names = ("rows", "samples", "tokens", "targets", "largest", "long", "dropped")
        self._counts = dict.fromkeys(names, 0)
        offsets, targets = array("q", [0]), array("i")
        with (folder / TOKENS).open("wb") as tokens, (folder / _TRAINED).open("wb") as trained:
            for batch, results in batches:
                for (format, row), result in zip(batch, results, strict=True):
                    self._count(format, row, result)
                    if isinstance(result, Encoded):
                        targets.append(self._store(result, tokens, trained))
                        offsets.append(self._counts["tokens"])
                self.progress.update(self._counts["rows"], self._counts["tokens"])
        np.array(offsets, "<i8").tofile(folder / _OFFSETS)
        np.array(targets, "<i4").tofile(folder / _TARGETS)
        self._report()
        return self._counts

    def _count(self, format: Format, row: Row, result: Encoded | Dropped) -> None:
        self._counts["rows"] += 1
        self._counts["long"] += result.long
        self._counts[FORM + format] = self._counts.get(FORM + format, 0) + 1
        if isinstance(result, Dropped):
            self._counts["dropped"] += 1
            self._dropped.setdefault(result.why, DroppedRows()).add(row)

    def _store(self, encoded: Encoded, tokens: BinaryIO, trained: BinaryIO) -> int:
        """Write one sample. Returns its number of targets."""
        tokens.write(encoded.ids.astype(self.dtype).tobytes())
        trained.write(encoded.trained.astype("u1").tobytes())
        targets = int(encoded.trained[1:].sum())
        self._counts["samples"] += 1
        self._counts["tokens"] += len(encoded.ids)
        self._counts["targets"] += targets
        self._counts["largest"] = max(self._counts["largest"], int(encoded.ids.max()))
        return targets

    def _report(self) -> None:
        reasons = [f"{dropped.count} rows {why}" for why, dropped in self._dropped.items()]
        if not self._counts["samples"]:
            raise StageError(
                f"no token to train on in {self._counts['rows']} rows: " + "; ".join(reasons),
                hint="check `loss`, the roles of the messages, the chat template and "
                "`sequence_length`",
            )
        for reason, dropped in zip(reasons, self._dropped.values(), strict=True):
            self.log.warning("dropped %s: %s", reason, dropped)


class TokenBlocks(Samples):
    """Windows of `length` + 1 tokens with stride `length`: every token but the first is a target
    once.

    The last window is shorter if the stream does not fill it. `first` and `count` select a
    contiguous part of the windows. `starts`, the places in the stream where documents begin, keeps
    documents apart: positions begin anew with each, and nothing predicts its first token.
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
        self._tokens = tokens
        self._length = length
        self._first = first
        self._count = block_count(len(tokens), length) - first if count is None else count
        self._starts = starts

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        start, stop = self._bounds(index)
        window = np.asarray(self._tokens[start:stop], dtype=np.int64)
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
        return stop - start - 1 - int(end - begin)

    def total_targets(self, indices: NDArray[np.int64]) -> int:
        starts = (self._first + require_indices(indices, self._count)) * self._length
        stops = np.minimum(starts + self._length + 1, len(self._tokens))
        begin, end = self._documents(starts, stops)
        return int((stops - starts - 1 - (end - begin)).sum())

    def _documents(self, start: Any, stop: Any) -> tuple[Any, Any]:
        """Return the range of documents that begin in a window behind its first token; arrays of
        bounds give arrays."""
        if self._starts is None:
            return 0, 0
        begin = np.searchsorted(self._starts, start, side="right")
        return begin, np.searchsorted(self._starts, stop)

    def _bounds(self, index: int) -> tuple[int, int]:
        start = (self._first + require_index(index, self._count)) * self._length
        return start, min(start + self._length + 1, len(self._tokens))


def _positions(length: int, borders: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0, 1, 2, ... beginning anew at each border; shape (length,)."""
    began = np.zeros(length, dtype=np.int64)
    inside = borders[borders < length]
    began[inside] = inside
    return np.arange(length) - np.maximum.accumulate(began)


def block_count(tokens: int, length: int) -> int:
    """Return the number of blocks with at least one target in a stream of `tokens` tokens."""
    return max(0, -(-(tokens - 1) // length))
