"""The sharing of the work of writing between the ranks that hold the same elements.

It is settled for families of tiles: as many of a tensor as one rule can state together. Tiles are
put together in three steps, as far as they and their holders are regular: tiles side by side are a
slab of whole rows, equal slabs a row of them, equal rows a family. A tile that is not regular stays
on its own, in the worst case each.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pipeline.checkpoint.division import CoverageError, Run, require_whole
from pipeline.checkpoint.tiles import Tile

WORTH_A_CUT = 1 << 18
"""Elements; ranks do not share the writing of less each."""
Tiles = Mapping[Tile, Sequence[int]]
"""Ranks that hold each tile of a tensor."""
Offsets = tuple[int, ...]
"""Numbers of a tile's holders, less the first one's."""


class Holders:
    """The ranks that hold each tile of tensors. Tensors that are held alike, as most are, share
    what is known about them: so it is of the size of the ranks, or of the tensors, not of both."""

    def __init__(self) -> None:
        self._last: dict[str, int] = defaultdict(int)
        """The last of the entries that belong to each tensor."""
        self._entries: list[tuple[int, Tile, int]] = [(0, Tile(0, 0), 0)]
        """The entry before, a tile, and a rank that holds it."""
        self._numbers: dict[tuple[int, Tile, int], int] = {}

    def add(self, rank: int, tile: Tile, key: str) -> None:
        """Record that a rank holds a tile of a tensor. Ranks come in order."""
        entry = self._last[key], tile, rank
        number = self._numbers.get(entry)
        if number is None:
            number = self._numbers[entry] = len(self._entries)
            self._entries.append(entry)
        self._last[key] = number

    def families(self, numels: Mapping[str, int]) -> Iterator[tuple[str, Run, Offsets]]:
        """Families of each tensor's tiles, as `families` finds them. Raises CoverageError."""
        known: dict[int, list[tuple[Run, Offsets]]] = {}
        for key in numels:
            number = self._last[key]
            try:
                if number not in known:
                    known[number] = list(families(self._tiles(number)))
            except CoverageError as error:
                raise CoverageError(f"{key}: {error}") from None
            yield from ((key, *family) for family in known[number])

    def _tiles(self, number: int) -> Tiles:
        found: dict[Tile, list[int]] = defaultdict(list)
        while number:
            number, tile, rank = self._entries[number]
            found[tile].append(rank)
        return {tile: ranks[::-1] for tile, ranks in found.items()}


def share_writing(holders: Holders, numels: Mapping[str, int], ranks: int) -> list[list[Run]]:
    """The runs of every tensor, given the holders and numbers of elements of all tensors.

    A range that several ranks hold is cut evenly between those of them whose numbers are equally
    far apart; a small one goes to one of them. Either goes where the least is to write. Raises
    CoverageError when the tiles do not make up the tensors.
    """
    load = [0] * ranks
    runs: dict[str, list[Run]] = {key: [] for key in numels}
    largest_first = sorted(holders.families(numels), key=lambda family: -family[1].length)
    for key, run, offsets in largest_first:
        runs[key].append(_shared(run, offsets, load))
    for own in runs.values():
        own.sort()
    require_whole(runs.values(), numels, ranks)
    return list(runs.values())


def _shared(run: Run, offsets: Offsets, load: list[int]) -> Run:
    """Choose who of the holders write the run's pieces; adds to the ranks' `load`, in elements."""
    number, apart = 1, 0
    if run.cuts == 1 and run.length // run.bands >= WORTH_A_CUT * len(offsets):
        number, apart = _progression(offsets)
        if not run._replace(cuts=number, apart=apart).is_unambiguous:
            number, apart = 1, 0
    if number > 1:
        run = run._replace(cuts=number, apart=apart)
    known = set(offsets)
    bases = [o for o in offsets if all(o + n * apart in known for n in range(number))]
    ranks = run.ranks
    base = min(bases, key=lambda base: max(load[rank + base] for rank in ranks))
    elements = -(-run.length // run.cuts // run.bands)
    for rank in ranks:
        load[rank + base] += elements
    return run._replace(rank=run.rank + base)


def _progression(offsets: Offsets) -> tuple[int, int]:
    """Number and distance of those that are equally far apart; of the nearest to the first, or of
    what those are repeated at, whichever are more."""
    found, known, at = (1, 0), set(offsets), 1
    for _ in range(2):
        if at >= len(offsets):
            break
        apart, number = offsets[at], 1
        while number * apart in known:
            number += 1
        found = max(found, (number, apart), key=lambda one: one[0])
        at = number
    return found


class _Kind(NamedTuple):
    """Traits that slabs must have in common to be in one family."""

    offsets: Offsets
    width: int = 0
    bands: int = 1
    across: int = 0


class _Slab(NamedTuple):
    """Whole rows [start, stop), in elements, on `rank` and those that its kind says."""

    start: int
    stop: int
    rank: int
    kind: _Kind


class _Row(NamedTuple):
    """`number` consecutive slabs, of `length` elements but for the last, on ranks that are
    `apart`."""

    kind: _Kind
    rank: int
    start: int
    stop: int
    length: int
    number: int
    apart: int

    @property
    def total(self) -> int:
        return self.stop - self.start


def families(tiles: Tiles) -> Iterator[tuple[Run, Offsets]]:
    """Runs whose pieces are the tiles, on the first holder of each, and the offsets of all holders.
    Raises CoverageError for columns that rows of no one length have."""
    strides = {tile.stride for tile in tiles} - {0}
    if len(strides) > 1:
        raise CoverageError("is held as columns of rows of different lengths")
    for width in strides:
        for start, stop, stride, count in tiles:
            if stride and not (start < stop <= start - start % width + width and count > 0):
                raise CoverageError(f"has no columns {start} to {stop} in rows of {width}")
    slabs, alone = _slabs(tiles)
    yield from alone
    family: list[_Row] = []
    for row in _rows(slabs):
        if family and not _is_like(row, family):
            yield from _runs(family)
            family = []
        family.append(row)
    if family:
        yield from _runs(family)


def _slabs(tiles: Tiles) -> tuple[list[_Slab], list[tuple[Run, Offsets]]]:
    """Slabs of whole rows in order, and runs for the tiles that are in none."""
    slabs, alone = [], []
    ordered, at = sorted(tiles), 0
    while at < len(ordered):
        tile = ordered[at]
        ranks = tiles[tile]
        offsets = tuple([rank - ranks[0] for rank in ranks])
        if not tile.stride:
            slabs.append(_Slab(tile.start, tile.stop, ranks[0], _Kind(offsets)))
            at += 1
            continue
        row = ordered[at : at - tile.stride // -tile.run]
        across = _across(row, tiles)
        if across is None:
            stop = tile.stop + (tile.count - 1) * tile.stride
            run = Run(tile.start, stop, tile.count * tile.stride, ranks[0], width=tile.stride)
            alone.append((run, offsets))
            at += 1
            continue
        kind = _Kind(offsets, tile.stride, len(row), across)
        stop = tile.start + tile.count * tile.stride
        slabs.append(_Slab(tile.start, stop, ranks[0], kind))
        at += len(row)
    return slabs, alone


def _across(row: Sequence[Tile], tiles: Tiles) -> int | None:
    """Distance of the ranks, if the tiles are all columns of the same rows, as a run divides
    them."""
    start, _, width, count = row[0]
    columns = -(-width // len(row))
    edges = [
        (start + left, start + min(left + columns, width)) for left in range(0, width, columns)
    ]
    if start % width or row != [Tile(left, right, width, count) for left, right in edges]:
        return None
    first = tiles[row[0]]
    across = tiles[row[1]][0] - first[0] if len(row) > 1 else 0
    wanted = [[rank + across * number for rank in first] for number in range(len(row))]
    is_ruled = wanted == [tiles[tile] for tile in row] and (across > 0) == (len(row) > 1)
    return across if is_ruled else None


def _rows(slabs: Sequence[_Slab]) -> Iterator[_Row]:
    """Rows of equal slabs, each as long as possible."""
    at = 0
    while at < len(slabs):
        start, stop, rank, kind = slabs[at]
        length, apart, end = stop - start, 0, at + 1
        while end < len(slabs) and stop - start == length * (end - at):
            low, high, other, its_kind = slabs[end]
            wanted = rank + (apart or max(other - rank, 0)) * (end - at)
            if low != stop or high - low > length or other != wanted or other == rank:
                break
            if its_kind != kind:
                break
            stop, apart, end = high, apart or other - rank, end + 1
        yield _Row(kind, rank, start, stop, length, end - at, apart)
        at = end


def _is_like(row: _Row, family: Sequence[_Row]) -> bool:
    """Whether a row goes on the family, all of whose rows are equal but the last."""
    first, last = family[0], family[-1]
    if row.kind != first.kind or row.start != last.stop or last.total != first.total:
        return False
    if row.total > first.total or row.length > first.length or row.rank <= last.rank:
        return False
    if len(family) > 1 and row.rank - last.rank != family[1].rank - first.rank:
        return False
    return row.number == 1 or (row.length, row.apart) == (first.length, first.apart)


def _runs(family: Sequence[_Row]) -> Iterator[tuple[Run, Offsets]]:
    """One run for the family if there can be one, else one for each of its rows, or slabs."""
    run = _run(family)
    if run is not None:
        yield run, family[0].kind.offsets
    elif len(family) > 1:
        for row in family:
            yield from _runs([row])
    else:
        row, kind = family[0], family[0].kind
        for number, start in enumerate(range(row.start, row.stop, row.length)):
            stop, rank = min(start + row.length, row.stop), row.rank + number * row.apart
            yield Run(start, stop, stop - start, rank, 0, 1, 0, *kind[1:]), kind.offsets


def _run(family: Sequence[_Row]) -> Run | None:
    first, stop = family[0], family[-1].stop
    kind, step = first.kind, 0
    if len(family) == 1:
        run = Run(first.start, stop, first.length, first.rank, first.apart, 1, 0, *kind[1:])
        return run if run.is_unambiguous else None
    step = family[1].rank - first.rank
    lengths = (first.start, stop, first.length, first.total)
    for width in [kind.width] if kind.width else [0, math.gcd(*lengths)]:
        unit = width or 1
        run = Run(
            first.start, stop, first.total, first.rank, step, first.number, first.apart, width,
            kind.bands, kind.across,
        )  # fmt: skip
        if run.is_unambiguous and -(-first.total // unit // first.number) * unit == first.length:
            return run
    return None
