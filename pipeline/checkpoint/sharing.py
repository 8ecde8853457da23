"""The sharing of the work of writing between the ranks that hold the same elements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from pipeline.checkpoint.division import CoverageError, Run, require_whole
from pipeline.checkpoint.families import Offsets, Tiles, families
from pipeline.checkpoint.tiles import Tile

WORTH_A_CUT = 1 << 18
"""Elements; ranks do not share the writing of less each."""


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
