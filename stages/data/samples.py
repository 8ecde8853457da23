"""Samples of different lengths with a mask of their targets, on disk."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np

from pipeline.contracts.data import NO_TARGET, Sample, Samples
from pipeline.errors import StageError
from stages.data import tokenize
from stages.data.cache import Counts, Entry
from stages.data.documents import require_within
from stages.data.encode import Dropped, Encoded, RowEncoder
from stages.data.formats import FormName
from stages.data.rows import Row
from stages.data.tokenize import Announcer

if TYPE_CHECKING:
    import logging
    from collections.abc import Iterator

T = TypeVar("T")
_TOKENS, _TRAINED, _OFFSETS, _TARGETS = "tokens.bin", "trained.bin", "offsets.bin", "targets.bin"
_ROWS_SHOWN = 5
_BATCH = 64
"""Rows that a process encodes at a time."""


class MaskedSamples(Samples):
    """Samples `first` ... `first` + `count` - 1 of a cache entry that SampleWriter wrote."""

    def __init__(self, entry: Entry, dtype: str, first: int = 0, count: int | None = None) -> None:
        self._tokens = entry.array(_TOKENS, dtype)
        self._trained = entry.array(_TRAINED, "u1")
        self._offsets = entry.array(_OFFSETS, "<i8")[:]
        self._targets = entry.array(_TARGETS, "<i4")[:]
        self._first = first
        self._count = len(self._targets) - first if count is None else count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        position = self._position(index)
        start, stop = int(self._offsets[position]), int(self._offsets[position + 1])
        ids = np.asarray(self._tokens[start:stop], dtype=np.int64)
        labels = np.where(self._trained[start + 1 : stop] != 0, ids[1:], NO_TARGET)
        return Sample(input_ids=ids[:-1], labels=labels)

    def targets(self, index: int) -> int:
        return int(self._targets[self._position(index)])

    def total_targets(self, indices: np.ndarray[Any, Any]) -> int:
        return int(self._targets[self._first + require_within(indices, self._count)].sum())

    def lengths(self) -> np.ndarray[Any, Any]:
        """How many `input_ids` each sample has; int64, shape (samples,)."""
        offsets = self._offsets[self._first : self._first + self._count + 1]
        return np.diff(np.asarray(offsets, dtype=np.int64)) - 1

    def all_targets(self) -> np.ndarray[Any, Any]:
        """`targets` of every sample; int64, shape (samples,)."""
        targets = self._targets[self._first : self._first + self._count]
        return np.asarray(targets, dtype=np.int64)

    def _position(self, index: int) -> int:
        if not 0 <= index < self._count:
            raise IndexError(f"sample {index} of {self._count}")
        return self._first + index


@dataclass
class LeftOut:
    """How many rows were left out for one reason, and the first of them."""

    count: int = 0
    first: list[str] = field(default_factory=list)
    """As file:row."""

    def add(self, row: Row) -> None:
        """One more."""
        self.count += 1
        if len(self.first) < _ROWS_SHOWN:
            self.first.append(f"{row.file}:{row.number}")

    def __str__(self) -> str:
        return ", ".join([*self.first, "..."] if self.count > len(self.first) else self.first)


@dataclass(kw_only=True)
class SampleWriter:
    """Encodes rows and writes those that can be trained on."""

    encoder: RowEncoder
    dtype: str
    workers: int | None
    log: logging.Logger
    announcer: Announcer
    _counts: Counts = field(init=False)
    _dropped: dict[str, LeftOut] = field(init=False)
    """Why -> which rows."""

    def write(self, folder: Path, rows: Iterable[tuple[FormName, Row]]) -> Counts:
        """Write the files of MaskedSamples. Returns `rows`, `samples`, `tokens`, `targets`,
        `largest` (id), `long` (rows that were truncated or dropped) and `dropped`.

        Raises DataError for a row that cannot be encoded, and StageError when no row is left.
        """
        names = ("rows", "samples", "tokens", "targets", "largest", "long", "dropped")
        self._counts = dict.fromkeys(names, 0)
        self._dropped = {}
        offsets, targets = array("q", [0]), array("i")
        encoded = tokenize.each(self.encoder.batch, chunks(rows, _BATCH), self.workers)
        with (folder / _TOKENS).open("wb") as tokens, (folder / _TRAINED).open("wb") as trained:
            for batch, results in encoded:
                for (_, row), result in zip(batch, results, strict=True):
                    self._counts["rows"] += 1
                    self._counts["long"] += result.long
                    if isinstance(result, Dropped):
                        self._drop(row, result)
                        continue
                    targets.append(self._store(result, tokens, trained))
                    offsets.append(self._counts["tokens"])
                self.announcer.tell(self._counts["rows"], self._counts["tokens"])
        np.array(offsets, "<i8").tofile(folder / _OFFSETS)
        np.array(targets, "<i4").tofile(folder / _TARGETS)
        self._report()
        return self._counts

    def _drop(self, row: Row, dropped: Dropped) -> None:
        self._counts["dropped"] += 1
        self._dropped.setdefault(dropped.why, LeftOut()).add(row)

    def _store(self, encoded: Encoded, tokens: BinaryIO, trained: BinaryIO) -> int:
        tokens.write(encoded.ids.astype(self.dtype).tobytes())
        trained.write(encoded.trained.astype("u1").tobytes())
        targets = int(encoded.trained[1:].sum())
        self._counts["samples"] += 1
        self._counts["tokens"] += len(encoded.ids)
        self._counts["targets"] += targets
        self._counts["largest"] = max(self._counts["largest"], int(encoded.ids.max()))
        return targets

    def _report(self) -> None:
        reasons = [f"{left_out.count} rows {why}" for why, left_out in self._dropped.items()]
        if not self._counts["samples"]:
            raise StageError(
                f"no token to train on in {self._counts['rows']} rows: " + "; ".join(reasons),
                hint="check `loss`, the roles of the messages, the chat template and "
                "`sequence_length`",
            )
        for why, left_out in self._dropped.items():
            self.log.warning("dropped %d rows %s: %s", left_out.count, why, left_out)


def chunks(items: Iterable[T], size: int) -> Iterator[Sequence[T]]:
    """`items` in lists of `size`, the last one shorter. What `items` raises comes behind all that
    was read before, so that earlier mistakes are found first."""
    chunk: list[T] = []
    try:
        for item in items:
            chunk.append(item)
            if len(chunk) == size:
                yield chunk
                chunk = []
    except StageError as error:
        yield chunk
        raise error from error.__cause__
    if chunk:
        yield chunk
