"""Views of sample sets: several rows packed in one sample, sources mixed, parts held out."""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline import Sample, Samples, StageError
from stages.data.cache import Counts, Entry
from stages.data.samples import CountedSamples, MaskedSamples, require_within

if TYPE_CHECKING:
    from stages.data.fields import Selection


_ROWS, _OFFSETS, _TARGETS = "rows.bin", "offsets.bin", "targets.bin"


class PackedSamples(CountedSamples):
    """Samples that each hold several of `rows`, with positions that begin anew at 0 with each. No
    row is cut, and none predicts the first token of the next."""

    def __init__(self, rows: Samples, entry: Entry) -> None:
        self._rows = rows
        self._members = entry.array(_ROWS, "<i8")[:]
        self._offsets = entry.array(_OFFSETS, "<i8")[:]
        self._targets = entry.array(_TARGETS, "<i8")[:]

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> Sample:
        start = int(self._offsets[self.checked(index)])
        members = self._members[start : int(self._offsets[index + 1])]
        rows = [self._rows[row] for row in members.tolist()]
        return Sample(
            input_ids=np.concatenate([row.input_ids for row in rows]),
            labels=np.concatenate([row.labels for row in rows]),
            positions=np.concatenate([np.arange(len(row.input_ids)) for row in rows]),
        )

    def total_targets(self, indices: NDArray[np.int64]) -> int:
        return int(self._targets[require_within(indices, len(self))].sum())

    def total_rows(self, indices: NDArray[np.int64]) -> int:
        return int((self._offsets[indices + 1] - self._offsets[indices]).sum())


def write_packs(folder: Path, rows: MaskedSamples, length: int) -> Counts:
    """Write the files of PackedSamples. Returns `samples`, and `positions` that hold a token."""
    lengths = np.asarray(rows.offsets[1:] - rows.offsets[:-1] - 1, np.int64)
    targets = np.asarray(rows.target_counts, np.int64)
    packs = best_fit_decreasing(lengths, length)
    offsets = np.cumsum([0, *map(len, packs)])
    members = np.array([row for pack in packs for row in pack], dtype="<i8")
    members.tofile(folder / _ROWS)
    offsets.astype("<i8").tofile(folder / _OFFSETS)
    np.add.reduceat(targets[members], offsets[:-1]).astype("<i8").tofile(folder / _TARGETS)
    return {"samples": len(packs), "positions": int(lengths.sum())}


def best_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> list[array[int]]:
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


class Mixture(CountedSamples):
    """Concatenated sets, each repeated to a given number of samples.

    If a set of n samples has c >= n places, place k holds sample floor(k n / c): every sample
    occurs floor(c / n) or ceil(c / n) times, and the extra occurrences are spread evenly.
    """

    def __init__(self, parts: Sequence[Samples], counts: Sequence[int]) -> None:
        self._parts = parts
        self._starts = list(itertools.accumulate(counts, initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Sample:
        part = bisect.bisect_right(self._starts, self.checked(index)) - 1
        start, stop = self._starts[part : part + 2]
        return self._parts[part][(index - start) * len(self._parts[part]) // (stop - start)]

    def total_targets(self, indices: NDArray[np.int64]) -> int:
        return sum(part.total_targets(own) for part, own in self._divided(indices))

    def total_rows(self, indices: NDArray[np.int64]) -> int:
        return sum(part.total_rows(own) for part, own in self._divided(indices))

    def _divided(self, indices: NDArray[np.int64]) -> Iterator[tuple[Samples, NDArray[np.int64]]]:
        """Yield each part with its own indices of these samples."""
        indices = require_within(indices, len(self))
        for part, start, stop in zip(self._parts, self._starts, self._starts[1:], strict=False):
            places = indices[(start <= indices) & (indices < stop)] - start
            yield part, places * len(part) // (stop - start)


def shares(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return the samples of each set in an epoch: proportional to the weights, rounded, and the
    fewest that hold every sample of every set."""
    pairs = list(zip(sizes, weights, strict=True))
    scale = max(size / weight for size, weight in pairs)
    return [max(size, round(scale * weight)) for size, weight in pairs]


def mixed(parts: Sequence[Samples], weights: Sequence[float] | None = None) -> Samples:
    """Return the sets mixed by weight; without weights, one behind the other."""
    if len(parts) == 1:
        return parts[0]
    sizes = [len(part) for part in parts]
    return Mixture(parts, sizes if weights is None else shares(sizes, weights))


def train_and_heldout(
    stage: Selection,
    entries: Sequence[Entry],
    size: Callable[[Entry], int],
    samples: Callable[[Entry, int, int], Samples],
    cut: Callable[[Entry, int], int],
) -> tuple[Samples, Samples | None]:
    """Return the samples to train and to evaluate on (collective if `samples` is).

    `entries` are those of the sources to train on and, after them, to evaluate on. `size` counts
    the samples of an entry; `samples(entry, first, count)` opens a part of them; `cut(entry,
    count)` gives the number of first samples, near `count`, that may be parted from the rest.
    Raises StageError if `heldout_fraction` leaves none to train on.
    """
    weights = [source.weight for source in stage.trained_on()]
    wanted = [_train_count(size(each), stage.heldout_fraction) for each in entries[: len(weights)]]
    cuts = [cut(entry, count) for entry, count in zip(entries, wanted, strict=False)]
    train = [samples(entry, 0, cut) for entry, cut in zip(entries, cuts, strict=False)]
    if stage.heldout_fraction:
        held = list(zip(entries, cuts, strict=True))
    else:
        held = [(entry, 0) for entry in entries[len(weights) :]]
    heldout = [samples(entry, first, size(entry) - first) for entry, first in held]
    return mixed(train, weights), mixed(heldout) if heldout else None


def _train_count(count: int, fraction: float) -> int:
    """Return how many of `count` samples are left if the last `fraction`, at least one sample for a
    fraction above 0, is held out."""
    held = max(1, round(count * fraction)) if fraction > 0 else 0
    if held >= count:
        raise StageError(
            f"holding out {fraction:g} of {count} samples leaves none to train on",
            hint="use more data, shorter samples or `heldout_files`",
        )
    return count - held
