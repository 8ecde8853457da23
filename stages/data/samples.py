"""Sources tokenised into cache entries, which are opened as samples: rows with a mask, or blocks of
a token stream; and views of them: several rows packed in one sample, sources mixed by weight."""

from __future__ import annotations

import bisect
import itertools
import json
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import (
    NO_TARGET,
    BadRows,
    Context,
    Data,
    DataError,
    ModelSource,
    Sample,
    Samples,
    StageError,
)
from pipeline.utils import cache_folder, expanded
from stages.data import tokenize
from stages.data.cache import Counts, Entry, VerifiedArray, prepare, prepare_locally
from stages.data.fields import Selection
from stages.data.mistakes import NOTES, Note, together
from stages.data.sources import OpenedSource, Source

BAD, CHANGED = "bad rows", "encoded otherwise"
"""Counts of an entry: rows with a mistake, which were dropped; rows or documents that earlier
versions encoded otherwise."""
TOKENS, STARTS, TRAINED = "tokens.bin", "starts.bin", "trained.bin"
OFFSETS, TARGETS, ROWS = "offsets.bin", "targets.bin", "rows.bin"
Indices = NDArray[np.int64]


class CountedSamples(Samples):
    """Samples whose targets and documents are known without reading them."""

    size: int
    """Number of samples, which a stream does not know."""

    def __len__(self) -> int:
        return self.size

    @abstractmethod
    def counted(self, indices: Indices) -> Indices:
        """Return how many targets and documents some samples have in all; shape (2,)."""

    def targets(self, index: int) -> int:
        return self.total_targets(np.array([index]))

    def total_targets(self, indices: Indices) -> int:
        return int(self.counted(indices)[0])

    def total_rows(self, indices: Indices) -> int:
        return int(self.counted(indices)[1])

    def within(self, indices: Any) -> Any:
        """Return an index, or some. Raises IndexError unless the set has them all."""
        each = np.atleast_1d(indices)
        if len(each) and not 0 <= each.min() <= each.max() < len(self):
            raise IndexError(f"samples {each.min()} to {each.max()} of {len(self)}")
        return indices


class MaskedSamples(CountedSamples):
    """Samples `first` ... `first` + `count` - 1 of an entry of rows."""

    def __init__(self, entry: Entry, dtype: str, first: int, count: int) -> None:
        self.size = count
        self._targets = VerifiedArray(entry.folder / TARGETS, "<i4")[first : first + count]
        self._tokens = VerifiedArray(entry.folder / TOKENS, dtype)
        self._trained = VerifiedArray(entry.folder / TRAINED, "u1")
        self._offsets = VerifiedArray(entry.folder / OFFSETS, "<i8")[first : first + count + 1]
        """Start of each sample's tokens, and end of the last."""

    def counted(self, indices: Indices) -> Indices:
        return np.array([self._targets[self.within(indices)].sum(), len(indices)])

    def __getitem__(self, index: int) -> Sample:
        start, stop = self._offsets[self.within(index) : index + 2].tolist()
        ids = np.asarray(self._tokens[start:stop], dtype=np.int64)
        labels = np.where(self._trained[start + 1 : stop] != 0, ids[1:], NO_TARGET)
        return Sample(input_ids=ids[:-1], labels=labels)

    def write_packs(self, folder: Path, length: int) -> Counts:
        """Write the files of PackedSamples; return `samples` and filled `positions`."""
        lengths = np.asarray(np.diff(self._offsets) - 1, np.int64)
        packs = best_fit_decreasing(lengths, length)
        offsets = np.cumsum([0, *map(len, packs)])
        members = np.array([row for pack in packs for row in pack], dtype="<i8")
        targets = np.asarray(self._targets, np.int64)[members]
        members.tofile(folder / ROWS)
        offsets.astype("<i8").tofile(folder / OFFSETS)
        np.add.reduceat(targets, offsets[:-1]).astype("<i8").tofile(folder / TARGETS)
        return {"samples": len(packs), "positions": int(lengths.sum())}


class PackedSamples(CountedSamples):
    """Samples that each hold several of `rows`, with positions that start again at 0 with each. No
    row is cut, and none predicts the first token of the next."""

    def __init__(self, rows: Samples, entry: Entry) -> None:
        self._rows, self._members = rows, VerifiedArray(entry.folder / ROWS, "<i8")[:]
        self._offsets, self._targets = (
            VerifiedArray(entry.folder / n, "<i8")[:] for n in (OFFSETS, TARGETS)
        )
        self.size = len(self._targets)

    def counted(self, indices: Indices) -> Indices:
        rows = self._offsets[self.within(indices) + 1] - self._offsets[indices]
        return np.array([self._targets[indices].sum(), rows.sum()])

    def __getitem__(self, index: int) -> Sample:
        start, stop = self._offsets[self.within(index) : index + 2].tolist()
        rows = [self._rows[row] for row in self._members[start:stop].tolist()]
        return Sample(
            input_ids=np.concatenate([row.input_ids for row in rows]),
            labels=np.concatenate([row.labels for row in rows]),
            positions=np.concatenate([np.arange(len(row.input_ids)) for row in rows]),
        )


def best_fit_decreasing(lengths: Indices, capacity: int) -> list[array[int]]:
    """Pack items into bins: the longest item first, each into the fullest bin with enough room
    (Johnson 1974, Fast algorithms for bin packing; at most 11/9 of the fewest bins, and one more).
    `lengths`: int64, shape (items,), none above `capacity`. Returns each bin's items in ascending
    order, the bins by their first item. Takes O(n log n) comparisons: bins are found by bisection
    among the distinct amounts of room."""
    bins: list[array[int]] = []
    rooms: list[int] = []  # distinct, ascending
    with_room: dict[int, list[int]] = {}
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            chosen, left = len(bins), capacity - length
            bins.append(array("q"))
        else:
            room = rooms[place]
            chosen, left = with_room[room].pop(), room - length
            if not with_room[room]:
                del with_room[room], rooms[place]
        bins[chosen].append(item)
        if left:
            if left not in with_room:
                bisect.insort(rooms, left)
            with_room.setdefault(left, []).append(chosen)
    return sorted((array("q", sorted(each)) for each in bins), key=lambda each: each[0])


class TokenBlocks(CountedSamples):
    """Windows of `length` + 1 tokens with stride `length`: every token but the first is a target
    once.

    The last window is shorter if the stream does not fill it. `first` and `count` select a
    contiguous part of the windows. `starts`, the places in the stream where documents begin, keeps
    documents apart: positions start again with each, and nothing predicts its first token.
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
        self._tokens, self._length, self._first, self._starts = tokens, length, first, starts
        self.size = block_count(len(tokens), length) - first if count is None else count

    def _bounds(self, indices: Any) -> tuple[Any, Any]:
        """Return the start and end in the stream of one window, or of an array of them."""
        starts = (self._first + self.within(indices)) * self._length
        return starts, np.minimum(starts + self._length + 1, len(self._tokens))

    def counted(self, indices: Indices) -> Indices:
        begin, end = self._bounds(indices)
        counts = np.array([(end - begin - 1).sum(), len(indices)])
        if self._starts is not None:
            first, last, after = np.searchsorted(self._starts, [begin + 1, end - 1, end])
            counts += np.array([(first - after).sum(), (last - first).sum()])
        return counts

    def __getitem__(self, index: int) -> Sample:
        start, stop = map(int, self._bounds(index))
        window = np.asarray(self._tokens[start:stop], dtype=np.int64)
        inputs, labels = window[:-1], window[1:]
        if self._starts is None:
            return Sample(input_ids=inputs, labels=labels)
        begin, end = np.searchsorted(self._starts, [start + 1, stop])
        borders = np.asarray(self._starts[begin:end], dtype=np.int64) - start
        labels = labels.copy()
        labels[borders - 1] = NO_TARGET
        began = np.zeros(len(inputs), dtype=np.int64)
        inside = borders[borders < len(inputs)]
        began[inside] = inside
        positions = np.arange(len(inputs)) - np.maximum.accumulate(began)
        return Sample(input_ids=inputs, labels=labels, positions=positions)


def block_count(tokens: int, length: int) -> int:
    """Return the number of blocks with at least one target in a stream of `tokens` tokens."""
    return max(0, -(-(tokens - 1) // length))


class Mixture(CountedSamples):
    """Concatenated sets, each repeated to a given number of samples.

    If a set of n samples has c >= n places, place k holds sample floor(k n / c): every sample
    occurs floor(c / n) or ceil(c / n) times, and the extra occurrences are spread evenly.
    """

    def __init__(self, parts: Sequence[CountedSamples], counts: Sequence[int]) -> None:
        self._parts, self._starts = parts, [0, *itertools.accumulate(counts)]
        self.size = self._starts[-1]

    def __getitem__(self, index: int) -> Sample:
        part = bisect.bisect_right(self._starts, self.within(index)) - 1
        start, stop = self._starts[part : part + 2]
        return self._parts[part][(index - start) * len(self._parts[part]) // (stop - start)]

    def counted(self, indices: Indices) -> Indices:
        self.within(indices)
        counts = np.zeros(2, np.int64)
        for part, start, stop in zip(self._parts, self._starts, self._starts[1:], strict=False):
            places = indices[(start <= indices) & (indices < stop)] - start
            counts += part.counted(places * len(part) // (stop - start))
        return counts


def mixed(
    parts: Sequence[CountedSamples], weights: Sequence[float] | None = None
) -> CountedSamples:
    """Return the sets mixed by weight; without weights, one after the other. An epoch holds the
    fewest samples that are every one of every set, in proportion to the weights but for
    rounding."""
    if len(parts) == 1:
        return parts[0]
    counts = [len(part) for part in parts]
    if weights is not None:
        pairs = list(zip(counts, weights, strict=True))
        scale = max(size / weight for size, weight in pairs)
        counts = [max(size, round(scale * weight)) for size, weight in pairs]
    return Mixture(parts, counts)


class Entries(ABC):
    """Tokenises sources into cache entries, and opens them as samples."""

    def __init__(self, ctx: Context, model: ModelSource, cache: str | None) -> None:
        """`cache` is the folder of the entries, else the user's is."""
        self.ctx, self.model, self.tokenizer = ctx, model, model.tokenizer()
        self.cache = expanded(cache) if cache else cache_folder()

    @abstractmethod
    def key(self, opened: OpenedSource) -> str:
        """Return the cache key of a source."""

    @abstractmethod
    def build(self, opened: OpenedSource, folder: Path) -> Counts:
        """Tokenise a source into a folder. Raises the error of its mistakes."""

    @abstractmethod
    def told(self, counts: Counts) -> Iterator[str]:
        """Yield what a source holds, in words. Notes say why rows were dropped or changed."""

    @abstractmethod
    def identity(self, entries: Sequence[Entry]) -> Mapping[str, str | int | float | None]:
        """Return everything that decides the samples of entries, but weights and held-out parts."""

    @abstractmethod
    def samples(self, entry: Entry, first: int = 0, count: int | None = None) -> CountedSamples:
        """Open some samples of an entry, or all from `first` on (collective)."""

    def open(self, sources: Sequence[Source]) -> list[Entry]:
        """Return the cache entries of sources, tokenised if they are absent (collective). Raises
        the DataError or BadRows of all sources together."""
        opened, seconds = list(map(OpenedSource, sources)), [0.0] * len(sources)
        errors, entries, log = list[DataError | BadRows](), list[Entry](), self.ctx.log
        with self.ctx.dist.rank0_first() as main:
            for number, each in enumerate(opened if main else ()):
                started = time.monotonic()
                try:  # all, whatever is wrong with others
                    prepare_locally(self.cache, self.key(each), partial(self.build, each))
                except (DataError, BadRows) as error:
                    errors.append(error)
                seconds[number] = time.monotonic() - started
            if errors:
                raise together(errors)
        for each, took in zip(opened, seconds, strict=True):
            started = time.monotonic() - took
            key, build = partial(self.key, each), partial(self.build, each)
            entries.append(entry := prepare(self.ctx, self.cache, key, build))
            tokenize.check_ids(self.model, entry.counts["largest"])
            took, words = time.monotonic() - started, ", ".join(self.told(entry.counts))
            log.info("%s: %s, %.1f s", each.source, words, took)
            log.debug(
                "%s: largest id %d, in %s", each.source, entry.counts["largest"], entry.folder
            )
            if self.ctx.dist.is_main and (entry.folder / NOTES).exists():
                names = [part.name for part in each.parts]
                for note in json.loads(VerifiedArray(entry.folder / NOTES, "u1")[:].tobytes()):
                    log.warning("%s", Note(**note).told(names))
        return entries

    def data(self, fields: Selection, *, packed: bool) -> Data:
        """Return the samples of a stage's sources (collective)."""
        (sources, heldout), fraction = fields.all_sources(), fields.heldout_fraction
        entries = self.open((*sources, *heldout))
        train, held = list[CountedSamples](), list[CountedSamples]()
        for entry in entries[: len(sources)]:
            # Rows are counted in their entry; the number of blocks follows from their length.
            size = entry.counts.get("samples") or len(self.samples(entry))
            last = max(1, round(size * fraction)) if fraction > 0 else 0
            if last >= size:
                raise StageError(
                    f"holding out {fraction:g} of {size} samples leaves none to train on",
                    hint="use more data, shorter samples or `heldout_files`",
                )
            cut = size - last
            if last and (entry.folder / ROWS).exists():
                # To the nearest end of a row: of a conversation whose turns are samples, none is
                # held out while others are trained on.
                starts = VerifiedArray(entry.folder / ROWS, "<i8")[:]
                if len(starts) == 1:
                    raise StageError(
                        "holding out a part of one conversation leaves none to train on",
                        hint="use more data or `heldout_files`",
                    )
                cut = int(starts[1:][np.abs(starts[1:] - cut).argmin()])
            train.append(self.samples(entry, 0, cut))
            if last:
                held.append(self.samples(entry, cut, size - cut))
        for entry in entries[len(sources) :]:
            held.append(self.samples(entry))
        weights = [source.weight for source in sources]
        return Data(
            train=mixed(train, weights),
            heldout=mixed(held) if held else None,
            pad_id=tokenize.pad_id(self.tokenizer),
            packed=packed,
            identity={
                "weights": json.dumps(weights),
                "heldout_fraction": fraction,
                **self.identity(entries),
            },
        )
