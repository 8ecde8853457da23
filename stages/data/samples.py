"""Samples in cache entries, rows with a mask and blocks of a token stream; and views of them:
several rows packed in one sample, sources mixed by weight."""

from __future__ import annotations

import bisect
import itertools
from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import NO_TARGET, Sample, Samples
from stages.data.cache import Counts, Entry, VerifiedArray

TOKENS, STARTS, TRAINED = "tokens.bin", "starts.bin", "trained.bin"
OFFSETS, TARGETS, ROWS = "offsets.bin", "targets.bin", "rows.bin"
Indices = NDArray[np.int64]


def require_within(indices: Indices, count: int) -> Indices:
    """Return the indices. Raises IndexError unless all of them are in [0, count)."""
    if len(indices) and not 0 <= indices.min() <= indices.max() < count:
        raise IndexError(f"samples {indices.min()} to {indices.max()} of {count}")
    return indices


class CountedSamples(Samples):
    """Samples whose targets and documents are known without reading them."""

    @abstractmethod
    def _counts(self, indices: Indices) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the targets and the documents of samples; shapes (indices,)."""

    def targets(self, index: int) -> int:
        return self.total_targets(np.array([index]))

    def total_targets(self, indices: Indices) -> int:
        return int(self._counts(require_within(indices, len(self)))[0].sum())

    def total_rows(self, indices: Indices) -> int:
        return int(self._counts(indices)[1].sum())

    def checked(self, index: int) -> int:
        """Return the index. Raises IndexError if it is not in the set."""
        require_within(np.array([index]), len(self))
        return index


class MaskedSamples(CountedSamples):
    """Samples `first` ... `first` + `count` - 1 of an entry of rows."""

    def __init__(self, entry: Entry, dtype: str, first: int, count: int) -> None:
        self._targets = entry.array(TARGETS, "<i4")[first : first + count]
        self._tokens, self._trained = entry.array(TOKENS, dtype), entry.array(TRAINED, "u1")
        self._offsets = entry.array(OFFSETS, "<i8")[first : first + count + 1]
        """Start of each sample's tokens, and end of the last."""

    def __len__(self) -> int:
        return len(self._targets)

    def _counts(self, indices: Indices) -> tuple[NDArray[Any], NDArray[Any]]:
        return self._targets[indices], np.ones(len(indices), np.int64)

    def __getitem__(self, index: int) -> Sample:
        start, stop = self._offsets[self.checked(index) : index + 2].tolist()
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
        self._rows, self._members = rows, entry.array(ROWS, "<i8")[:]
        self._offsets, self._targets = (entry.array(n, "<i8")[:] for n in (OFFSETS, TARGETS))

    def __len__(self) -> int:
        return len(self._targets)

    def _counts(self, indices: Indices) -> tuple[NDArray[Any], NDArray[Any]]:
        return self._targets[indices], self._offsets[indices + 1] - self._offsets[indices]

    def __getitem__(self, index: int) -> Sample:
        start, stop = self._offsets[self.checked(index) : index + 2].tolist()
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
    among the distinct amounts of room.
    """
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
        self._count = block_count(len(tokens), length) - first if count is None else count

    def __len__(self) -> int:
        return self._count

    def _bounds(self, indices: Any) -> tuple[Any, Any]:
        """Return the start and end in the stream of one window, or of an array of them."""
        starts = (self._first + indices) * self._length
        return starts, np.minimum(starts + self._length + 1, len(self._tokens))

    def _counts(self, indices: Indices) -> tuple[NDArray[Any], NDArray[Any]]:
        begin, end = self._bounds(indices)
        if self._starts is None:
            return end - begin - 1, np.ones(len(indices), np.int64)
        first, last, after = np.searchsorted(self._starts, [begin + 1, end - 1, end])
        return end - begin - 1 - (after - first), 1 + last - first

    def __getitem__(self, index: int) -> Sample:
        start, stop = map(int, self._bounds(self.checked(index)))
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


class JoinedSamples(Samples):
    """Samples of several sets; each counts its own."""

    @abstractmethod
    def _divided(self, indices: Indices) -> Iterator[tuple[Samples, Indices]]:
        """Yield each set with its own indices of these samples."""

    def targets(self, index: int) -> int:
        return self.total_targets(np.array([index]))

    def total_targets(self, indices: Indices) -> int:
        return sum(part.total_targets(own) for part, own in self._divided(indices))

    def total_rows(self, indices: Indices) -> int:
        return sum(part.total_rows(own) for part, own in self._divided(indices))


class Mixture(JoinedSamples):
    """Concatenated sets, each repeated to a given number of samples.

    If a set of n samples has c >= n places, place k holds sample floor(k n / c): every sample
    occurs floor(c / n) or ceil(c / n) times, and the extra occurrences are spread evenly.
    """

    def __init__(self, parts: Sequence[Samples], counts: Sequence[int]) -> None:
        self._parts, self._starts = parts, [0, *itertools.accumulate(counts)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Sample:
        require_within(np.array([index]), len(self))
        part = bisect.bisect_right(self._starts, index) - 1
        start, stop = self._starts[part : part + 2]
        return self._parts[part][(index - start) * len(self._parts[part]) // (stop - start)]

    def _divided(self, indices: Indices) -> Iterator[tuple[Samples, Indices]]:
        indices = require_within(indices, len(self))
        for part, start, stop in zip(self._parts, self._starts, self._starts[1:], strict=False):
            places = indices[(start <= indices) & (indices < stop)] - start
            yield part, places * len(part) // (stop - start)


def mixed(parts: Sequence[Samples], weights: Sequence[float] | None = None) -> Samples:
    """Return the sets mixed by weight; without weights, one after the other.

    An epoch holds the fewest samples that are every one of every set, in proportion to the weights
    but for rounding.
    """
    if len(parts) == 1:
        return parts[0]
    counts = [len(part) for part in parts]
    if weights is not None:
        pairs = list(zip(counts, weights, strict=True))
        scale = max(size / weight for size, weight in pairs)
        counts = [max(size, round(scale * weight)) for size, weight in pairs]
    return Mixture(parts, counts)
