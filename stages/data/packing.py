"""Several documents in one sample, so that little of it is padding."""

from __future__ import annotations

import bisect
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.artifacts import Sample, Samples
from stages.data.blocks import require_within
from stages.data.cache import KEYS, Counts, Entry, digest
from stages.data.samples import MaskedSamples

_ROWS, _OFFSETS, _TARGETS = "rows.bin", "offsets.bin", "targets.bin"


class PackedSamples(Samples):
    """Each sample is some of `rows`, one behind the other, with positions that begin anew at 0 with
    each. No row is cut, and none predicts the first token of the next."""

    def __init__(self, rows: Samples, entry: Entry) -> None:
        self._rows = rows
        self._members = entry.array(_ROWS, "<i8")[:]
        self._offsets = entry.array(_OFFSETS, "<i8")[:]
        self._targets = entry.array(_TARGETS, "<i8")[:]

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> Sample:
        rows = [self._rows[row] for row in self.members(index)]
        return Sample(
            input_ids=np.concatenate([row.input_ids for row in rows]),
            labels=np.concatenate([row.labels for row in rows]),
            positions=np.concatenate([np.arange(len(row.input_ids)) for row in rows]),
        )

    def targets(self, index: int) -> int:
        return int(self._targets[self._checked(index)])

    def total_targets(self, indices: np.ndarray[Any, Any]) -> int:
        return int(self._targets[require_within(indices, len(self))].sum())

    def members(self, index: int) -> list[int]:
        """The rows in sample `index`, in order."""
        start = int(self._offsets[self._checked(index)])
        members: list[int] = self._members[start : int(self._offsets[index + 1])].tolist()
        return members

    def _checked(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return index


def pack_key(rows: Entry, first: int, count: int, length: int) -> str:
    """The cache key of a packing of some of an entry's rows."""
    return digest(["packing", KEYS, rows.key, first, count, length])


def write_packs(folder: Path, rows: MaskedSamples, length: int) -> Counts:
    """Write the files of PackedSamples; returns `samples`, and `positions` that hold a token."""
    lengths, targets = rows.lengths(), rows.all_targets()
    packs = best_fit_decreasing(lengths, length)
    offsets = np.cumsum([0, *map(len, packs)])
    members = np.array([row for pack in packs for row in pack], dtype="<i8")
    members.tofile(folder / _ROWS)
    offsets.astype("<i8").tofile(folder / _OFFSETS)
    np.add.reduceat(targets[members], offsets[:-1]).astype("<i8").tofile(folder / _TARGETS)
    return {"samples": len(packs), "positions": int(lengths.sum())}


def best_fit_decreasing(lengths: np.ndarray[Any, Any], capacity: int) -> list[array[int]]:
    """Items into bins: each, the longest first, into the fullest bin that still takes it (Johnson
    1974, Fast algorithms for bin packing; at most 11/9 of the fewest bins, and one more).

    `lengths`: int64, shape (items,), none above `capacity`. Returns each bin's items in ascending
    order, the bins by their first item. Takes O(n log n) comparisons: bins are found by bisection
    among the distinct rooms that are left.
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
