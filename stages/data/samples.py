"""Samples of different lengths with a mask of their targets, on disk."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import numpy as np

from pipeline.artifacts import NO_TARGET, Sample, Samples
from pipeline.errors import StageError
from stages.data.cache import Counts, Entry
from stages.data.conversations import Completion, Conversation
from stages.data.turns import Encoded

if TYPE_CHECKING:
    import logging

TooLong = Literal["truncate", "drop", "error"]
_TOKENS, _TRAINED, _OFFSETS, _TARGETS = "tokens.bin", "trained.bin", "offsets.bin", "targets.bin"
_LOG_SECONDS = 10.0
_ROWS_SHOWN = 5


class MaskedSamples(Samples):
    """Samples `first` ... `first` + `count` - 1 of a cache entry that SampleWriter wrote."""

    def __init__(self, entry: Entry, dtype: str, first: int = 0, count: int | None = None) -> None:
        self._tokens = entry.array(_TOKENS, dtype)
        self._trained = entry.array(_TRAINED, "u1")
        self._offsets = entry.array(_OFFSETS, "<i8")
        self._targets = entry.array(_TARGETS, "<i4")
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

    def _position(self, index: int) -> int:
        if not 0 <= index < self._count:
            raise IndexError(f"sample {index} of {self._count}")
        return self._first + index


@dataclass(kw_only=True)
class SampleWriter:
    """Encodes rows and writes those that can be trained on."""

    encode: Callable[[Conversation | Completion], Encoded]
    dtype: str
    sequence_length: int
    too_long: TooLong
    log: logging.Logger
    _counts: Counts = field(init=False)
    _dropped: dict[str, list[str]] = field(init=False)
    """Why -> the first few rows, as file:row."""

    def write(self, folder: Path, items: Iterable[Conversation | Completion]) -> Counts:
        """Write the files of MaskedSamples. Returns `rows`, `samples`, `tokens`, `targets`,
        `largest` (id), `long` (rows that were truncated or dropped) and `dropped`.

        Raises DataError for a row that cannot be encoded, and StageError when no row is left.
        """
        names = ("rows", "samples", "tokens", "targets", "largest", "long", "dropped")
        self._counts = dict.fromkeys(names, 0)
        self._dropped = {}
        offsets, targets = array("q", [0]), array("i")
        spoken = time.monotonic()
        with (folder / _TOKENS).open("wb") as tokens, (folder / _TRAINED).open("wb") as trained:
            for item in items:
                self._counts["rows"] += 1
                encoded = self._fit(item, self.encode(item))
                if encoded is not None:
                    targets.append(self._store(encoded, tokens, trained))
                    offsets.append(self._counts["tokens"])
                if time.monotonic() - spoken > _LOG_SECONDS:
                    spoken = time.monotonic()
                    self.log.info("tokenising: %(rows)d rows, %(tokens)d tokens", self._counts)
        np.array(offsets, "<i8").tofile(folder / _OFFSETS)
        np.array(targets, "<i4").tofile(folder / _TARGETS)
        self._report()
        return self._counts

    def _fit(self, item: Conversation | Completion, encoded: Encoded) -> Encoded | None:
        """The row cut to length; None when nothing in it can be trained on."""
        room = self.sequence_length + 1
        if not encoded.trained[1:].any():
            return self._drop(item, "without an assistant turn to train on")
        if len(encoded.ids) <= room:
            return encoded
        self._counts["long"] += 1
        if self.too_long == "error":
            raise item.row.error(
                f"{len(encoded.ids) - 1} tokens, but `sequence_length` is {self.sequence_length}"
            )
        if self.too_long == "drop":
            return self._drop(item, "longer than `sequence_length`")
        if not encoded.trained[1:room].any():
            return self._drop(item, "whose assistant turns lie behind `sequence_length`")
        return Encoded(ids=encoded.ids[:room], trained=encoded.trained[:room])

    def _drop(self, item: Conversation | Completion, why: str) -> Encoded | None:
        self._counts["dropped"] += 1
        self._dropped.setdefault(why, []).append(f"{item.row.file}:{item.row.number}")
        return None

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
        reasons = [f"{len(rows)} rows {why}" for why, rows in self._dropped.items()]
        if not self._counts["samples"]:
            raise StageError(
                f"no token to train on in {self._counts['rows']} rows: " + "; ".join(reasons),
                hint="check the roles of the messages, the chat template and `sequence_length`",
            )
        for why, rows in self._dropped.items():
            shown = ", ".join(rows[:_ROWS_SHOWN]) + (", ..." if len(rows) > _ROWS_SHOWN else "")
            self.log.warning("dropped %d rows %s: %s", len(rows), why, shown)
