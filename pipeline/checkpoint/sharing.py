"""Who writes what, given what each rank holds: everything once, replicas sharing the work."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeline.checkpoint.division import LARGEST, Division, Pieces, Run

if TYPE_CHECKING:
    from numpy.typing import NDArray

WHOLE = 1 << 18
"""Elements; a share below that is not worth a cut."""


class _Family(NamedTuple):
    """Parts of a tensor of one length, one behind the other, each held by as many ranks."""

    tensor: int
    start: int
    stop: int
    length: int
    ranks: NDArray[np.int32]
    """Shape (parts, holders of each)."""


def share_writing(held: Sequence[Pieces], numels: Sequence[int]) -> list[list[Run]]:
    """The runs of every tensor, given what each rank holds, and how many elements tensors have.

    A range that several ranks hold is cut evenly between them; a small one goes whole to the
    holders with the least to write. Raises Misfit when what is held does not make up the tensors.
    """
    load = np.zeros(len(held), dtype=np.int64)
    runs: list[list[Run]] = [[] for _ in numels]
    for family in sorted(_families(held, len(numels)), key=lambda family: -family.length):
        runs[family.tensor] += _share(family, load)
    for own in runs:
        own.sort()
    Division(runs).require_sense(numels, len(held))
    return runs


def _share(family: _Family, load: NDArray[np.int64]) -> Iterator[Run]:
    """Who writes a family; adds that to their `load`."""
    _, start, stop, length, ranks = family
    holders = ranks.shape[1]
    if length < WHOLE * holders:
        least = int(load[ranks].max(axis=0).argmin())
        ranks = ranks[:, least : least + 1]
    run = Run(start, stop, length, int(ranks[0, 0]), *_steps(ranks))
    load[ranks] += run.cut
    if _is_regular(ranks):
        yield run
        return
    for rank, low in zip(ranks[0].tolist(), range(start, stop, run.cut), strict=False):
        high = min(low + run.cut, stop)
        yield Run(low, high, high - low, rank)


def _steps(ranks: NDArray[np.int32]) -> tuple[int, int, int]:
    """From part to part, holders, and from holder to holder."""
    parts, holders = ranks.shape
    step = int(ranks[1, 0] - ranks[0, 0]) if parts > 1 else 0
    return step, holders, int(ranks[0, 1] - ranks[0, 0]) if holders > 1 else 0


def _is_regular(ranks: NDArray[np.int32]) -> bool:
    """Whether a run can say them."""
    parts, holders = ranks.shape
    step, _, apart = _steps(ranks)
    grid = ranks[0, 0] + step * np.arange(parts)[:, None] + apart * np.arange(holders)
    return (
        step >= 0
        and Run(0, parts, 1, 0, step, holders, apart).is_clear
        and bool((ranks == grid).all())
    )


def _families(held: Sequence[Pieces], tensors: int) -> Iterator[_Family]:
    counts = [len(pieces.tensor) for pieces in held]
    key, done = np.empty(sum(counts), dtype=np.int64), 0
    for pieces, count in zip(held, counts, strict=True):
        key[done : done + count] = pieces.tensor * LARGEST + pieces.start
        done += count
    order = np.argsort(key, kind="stable")
    key = key[order]
    stop = np.concatenate([pieces.stop for pieces in held])[order]
    rank = np.repeat(np.arange(len(held), dtype=np.int32), counts)[order]
    del order
    edges = np.searchsorted(key, np.arange(tensors + 1) * LARGEST).tolist()
    for tensor, (low, high) in enumerate(itertools.pairwise(edges)):
        start = key[low:high] - tensor * LARGEST
        yield from _families_of(tensor, start, stop[low:high], rank[low:high])


def _families_of(
    tensor: int, start: NDArray[np.int64], stop: NDArray[np.int64], rank: NDArray[np.int32]
) -> Iterator[_Family]:
    """Rules of one tensor: one where its parts are as regular as strategies cut them, else many."""
    if not len(start):
        return
    different = (start[1:] != start[:-1]) | (stop[1:] != stop[:-1])
    edges = [0, *(np.flatnonzero(different) + 1).tolist(), len(start)]
    parts = len(edges) - 1
    length = int(stop[0] - start[0])
    begins = start[edges[:-1]]
    regular = len(start) % parts == 0 and bool(
        (np.diff(edges) == len(start) // parts).all()
        and (begins == begins[0] + length * np.arange(parts)).all()
        and (stop[edges[:-2]] == begins[1:]).all()
        and stop[-1] - start[-1] <= length
    )
    ranks = rank.reshape(parts, -1) if regular else None
    if ranks is not None and (parts == 1 or _is_regular(ranks)):
        yield _Family(tensor, int(start[0]), int(stop[-1]), length, ranks)
        return
    for low, high in itertools.pairwise(edges):
        first, last = int(start[low]), int(stop[low])
        yield _Family(tensor, first, last, last - first, rank[None, low:high])
