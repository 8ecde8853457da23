"""Samples in cache entries: rows with a mask of their targets, and blocks of a token stream."""

from __future__ import annotations

import dataclasses
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import NO_TARGET, Context, Sample, Samples, StageError
from pipeline.utils import activity, counted
from stages.data.cache import Counts, Entry, VerifiedArray
from stages.data.conversations import ENDED, LAID_OUT, UNRENDERED
from stages.data.encode import EMPTY_ANSWER, Dropped, Encoded
from stages.data.forms import Form
from stages.data.mistakes import Mistake, Mistakes, Note, write_notes
from stages.data.rows import JSON, JSON_LINES, Row
from stages.data.tokenize import FORMATTED, TOKENISING

TOKENS, STARTS = "tokens.bin", "starts.bin"
_TRAINED, _OFFSETS, _TARGETS = "trained.bin", "offsets.bin", "targets.bin"
_ROWS = "rows.bin"
FORM = "form "
"""Prefix of the counts of an entry's rows by form."""
BAD, NULLS, CHANGED, CUT = "bad rows", "nulls", "encoded otherwise", "cut shorter"
"""Counts of an entry: rows with a mistake, which were dropped; rows of JSON files of which nulls
were removed; rows with notes, which earlier versions encoded otherwise; and rows of which earlier
versions kept a token more."""
DROPPED = {UNRENDERED: "dropped as unrendered", EMPTY_ANSWER: "dropped as empty"}
"""Reasons why `data.chat` drops turns that it may train on, and the counts of the rows."""
_CHANGED = (ENDED, LAID_OUT, FORMATTED)
"""Notes on rows that earlier versions encoded otherwise."""
Result = Sequence[Encoded | Dropped] | Mistake
"""The samples of a row, or what is wrong with it."""


def require_within(indices: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the indices. Raises IndexError unless all of them are in [0, count)."""
    if len(indices) and not 0 <= indices.min() <= indices.max() < count:
        raise IndexError(f"samples {indices.min()} to {indices.max()} of {count}")
    return indices


class CountedSamples(Samples):
    """Base of sets that know the targets of many samples at once."""

    def targets(self, index: int) -> int:
        return self.total_targets(np.array([index]))

    def total_rows(self, indices: NDArray[np.int64]) -> int:
        return len(indices)

    def checked(self, index: int) -> int:
        """Return the index. Raises IndexError if it is not in the set."""
        require_within(np.array([index]), len(self))
        return index


class MaskedSamples(CountedSamples):
    """Samples `first` ... `first` + `count` - 1 of a cache entry that write_samples wrote."""

    def __init__(self, entry: Entry, dtype: str, first: int, count: int) -> None:
        self._tokens = entry.array(TOKENS, dtype)
        self._trained = entry.array(_TRAINED, "u1")
        self.offsets = entry.array(_OFFSETS, "<i8")[first : first + count + 1]
        """Start of each sample's tokens, and end of the last."""
        self.target_counts = entry.array(_TARGETS, "<i4")[first : first + count]

    def __len__(self) -> int:
        return len(self.target_counts)

    def __getitem__(self, index: int) -> Sample:
        start, stop = self.offsets[self.checked(index) : index + 2].tolist()
        ids = np.asarray(self._tokens[start:stop], dtype=np.int64)
        labels = np.where(self._trained[start + 1 : stop] != 0, ids[1:], NO_TARGET)
        return Sample(input_ids=ids[:-1], labels=labels)

    def total_targets(self, indices: NDArray[np.int64]) -> int:
        return int(self.target_counts[require_within(indices, len(self))].sum())


def row_starts(entry: Entry) -> NDArray[np.int64] | None:
    """Return the index of the first sample of each row, ascending from 0; None if each row is one
    sample."""
    if not (entry.folder / _ROWS).exists():
        return None
    return np.asarray(entry.array(_ROWS, "<i8")[:], np.int64)


def write_samples(
    folder: Path,
    batches: Iterable[tuple[Sequence[tuple[Form, Row]], Sequence[Result]]],
    dtype: str,
    ctx: Context,
    mistakes: Mistakes,
) -> Counts:
    """Write batches of rows with their tokens as the files of MaskedSamples, the file of
    `row_starts` if a row has several samples, and notes on what was dropped and changed.

    Returns `rows`, `samples`, `tokens`, `targets`, `largest` (id), `long` (rows that were truncated
    or dropped), `dropped`, BAD, NULLS, CHANGED, CUT, those of DROPPED, and the rows of each form.
    Raises the error of `mistakes`, which is given those of the batches, and StageError if every row
    is dropped.
    """
    names = ["rows", "samples", "tokens", "targets", "largest", "long", "dropped"]
    names += [BAD, NULLS, CHANGED, CUT, *DROPPED.values()]
    counts, noted = dict.fromkeys(names, 0), _Noted(mistakes)
    offsets, targets, starts = array("q", [0]), array("i"), array("q")
    with (
        (folder / TOKENS).open("wb") as tokens,
        (folder / _TRAINED).open("wb") as trained,
        activity(TOKENISING, unit="rows") as doing,
    ):
        for batch, results in batches:
            for (form, row), found in zip(batch, results, strict=True):
                if isinstance(found, Mistake):
                    mistakes.add(row.error(found.message, hint=found.hint))
                    continue
                counts["rows"] += 1
                counts["long"] += any(each.long for each in found)
                counts[CUT] += any(each.kept_more for each in found)
                counts[FORM + form] = counts.get(FORM + form, 0) + 1
                kept = [each for each in found if isinstance(each, Encoded)]
                if kept:
                    starts.append(len(targets))
                for sample in kept:
                    tokens.write(sample.ids.astype(dtype).tobytes())
                    trained.write(sample.trained.astype("u1").tobytes())
                    counts["tokens"] += len(sample.ids)
                    counts["largest"] = max(counts["largest"], int(sample.ids.max()))
                    offsets.append(counts["tokens"])
                    targets.append(int(sample.trained[1:].sum()))
                counts["dropped"] += not kept
                noted.row(row, found, counts)
            ctx.dist.heartbeat.beat()
            doing.advance(len(batch))
    np.array(offsets, "<i8").tofile(folder / _OFFSETS)
    np.array(targets, "<i4").tofile(folder / _TARGETS)
    if len(starts) < len(targets):
        np.array(starts, "<i8").tofile(folder / _ROWS)
    counts["rows"] += mistakes.count
    mistakes.check(counts["rows"])
    counts |= {"samples": len(targets), "targets": sum(targets), BAD: mistakes.count}
    counts["dropped"] += mistakes.count
    notes = [*mistakes.notes(), *noted.notes()]
    if not targets:
        raise _nothing(counts["rows"], notes)
    write_notes(folder, notes)
    return counts


def _nothing(rows: int, notes: Sequence[Note]) -> StageError:
    reasons = "; ".join(note.text.removeprefix("dropped ") for note in notes)
    return StageError(
        f"no token to train on in {counted(rows, 'rows')}: {reasons}",
        hint="check `loss`, the roles of the messages, the chat template and `sequence_length`",
    )


class _Noted:
    """Counts of what was done with rows, and the first row of each."""

    def __init__(self, mistakes: Mistakes) -> None:
        self._mistakes = mistakes
        self._counts = Counter[str]()
        self._first: dict[str, tuple[Row, str]] = {}

    def row(self, row: Row, found: Sequence[Encoded | Dropped], counts: Counts) -> None:
        """Count what was done with a row, which became some samples, or none."""
        kept = [each for each in found if isinstance(each, Encoded)]
        for why in dict.fromkeys(each.why for each in found if isinstance(each, Dropped)):
            self._add(f"dropped {'turns of ' if kept else ''}{{}} {why}", row)
            if why in DROPPED:
                counts[DROPPED[why]] += 1
        notes = dict.fromkeys(note for each in kept for note in each.notes)
        for note in notes:
            self._add(f"{{}} {note}", row)
        counts[CHANGED] += any(note in _CHANGED for note in notes)
        if kept and kept[0].nulls:
            self._add("removed nulls from objects in {}", row, kept[0].nulls)
            counts[NULLS] += str(row.file).endswith((*JSON, *JSON_LINES))

    def _add(self, what: str, row: Row, place: str = "") -> None:
        """Count a row. `what` has `{}` for the number of rows; `place` is one in the row."""
        self._counts[what] += 1
        self._first.setdefault(what, (row, place))

    def notes(self) -> list[Note]:
        """Return a note for each thing that was done."""
        found = []
        for what, count in self._counts.items():
            row, place = self._first[what]
            part = self._mistakes.part(row.file)
            note = Note(text=what.format(counted(count, "rows")), part=part, row=row.number)
            found.append(dataclasses.replace(note, place=place, hint=_KEPT) if place else note)
        return found


_KEPT = (
    "they stand for keys that only other rows have; a null that is meant is kept where tools or "
    "arguments are JSON text"
)


@dataclass(frozen=True, eq=False)
class TokenBlocks(CountedSamples):
    """Windows of `length` + 1 tokens with stride `length`: every token but the first is a target
    once.

    The last window is shorter if the stream does not fill it. `first` and `count` select a
    contiguous part of the windows. `starts`, the places in the stream where documents begin, keeps
    documents apart: positions begin anew with each, and nothing predicts its first token.
    """

    tokens: NDArray[Any] | VerifiedArray
    length: int
    first: int = 0
    count: int | None = None
    starts: NDArray[Any] | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        rest = block_count(len(self.tokens), self.length) - self.first
        return rest if self.count is None else self.count

    def __getitem__(self, index: int) -> Sample:
        start, stop = map(int, self._bounds(self.checked(index)))
        window = np.asarray(self.tokens[start:stop], dtype=np.int64)
        inputs, labels = window[:-1], window[1:]
        if self.starts is None:
            return Sample(input_ids=inputs, labels=labels)
        begin, end = np.searchsorted(self.starts, [start + 1, stop])
        borders = np.asarray(self.starts[begin:end], dtype=np.int64) - start
        labels = labels.copy()
        labels[borders - 1] = NO_TARGET
        began = np.zeros(len(inputs), dtype=np.int64)
        inside = borders[borders < len(inputs)]
        began[inside] = inside
        positions = np.arange(len(inputs)) - np.maximum.accumulate(began)
        return Sample(input_ids=inputs, labels=labels, positions=positions)

    def total_targets(self, indices: NDArray[np.int64]) -> int:
        starts, stops = self._bounds(require_within(indices, len(self)))
        total = int((stops - starts - 1).sum())
        if self.starts is not None:  # the first tokens of documents are no targets
            begin, end = np.searchsorted(self.starts, [starts + 1, stops])
            total -= int((end - begin).sum())
        return total

    def total_rows(self, indices: NDArray[np.int64]) -> int:
        if self.starts is None:
            return len(indices)
        starts, stops = self._bounds(indices)
        begin, end = np.searchsorted(self.starts, [starts + 1, stops - 1])
        return len(indices) + int((end - begin).sum())

    def _bounds(self, indices: Any) -> tuple[Any, Any]:
        """Return the start and end in the stream of one window, or of an array of them."""
        starts = (self.first + indices) * self.length
        return starts, np.minimum(starts + self.length + 1, len(self.tokens))


def block_count(tokens: int, length: int) -> int:
    """Return the number of blocks with at least one target in a stream of `tokens` tokens."""
    return max(0, -(-(tokens - 1) // length))
