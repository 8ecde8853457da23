"""The division of tensors among ranks: runs, which state it by rule, and the sharing of the work of
writing between the ranks that hold the same elements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

from annotated_types import Ge

WORTH_A_CUT = 1 << 18
"""Elements; ranks do not share the writing of less each."""

Count = Annotated[int, Ge(0)]
Positive = Annotated[int, Ge(1)]


class CoverageError(ValueError):
    """Ranges overlap, leave a gap, or reach beyond the tensor."""


class Span(NamedTuple):
    """Elements [start, stop) of the logical tensor `key`."""

    key: str
    start: int
    stop: int


class Run(NamedTuple):
    """Elements [start, stop) of a tensor: parts of `length`, the last perhaps shorter, on ranks
    `rank`, `rank + step`, ... Each is cut again into `cuts` equal parts, on ranks that are `apart`.
    """

    start: Count
    stop: Count
    length: Positive
    rank: Count
    step: Count = 0
    cuts: Positive = 1
    apart: Count = 0

    @property
    def parts(self) -> int:
        """Number of parts, before each is cut again."""
        return -(-(self.stop - self.start) // self.length)

    @property
    def cut(self) -> int:
        """Elements of a part of a part, but for the last ones."""
        return -(-self.length // self.cuts)

    @property
    def is_clear(self) -> bool:
        """Whether it has at most one piece for a rank, which the rank's number determines."""
        steps = [(self.step, self.parts), (self.apart, self.cuts)]
        (inner, few), (outer, _) = sorted(steps)
        if self.length > self.stop - self.start:
            return False
        determined = all(many > 0 and (step > 0) == (many > 1) for step, many in steps)
        return determined and (outer > inner * (few - 1) or outer == 0)

    def of(self, rank: int) -> tuple[int, int] | None:
        """Start and stop of the rank's piece; None if it has none."""
        rest = rank - self.rank
        if self.apart > self.step:
            cut, rest = _divided(rest, self.apart)
            part, rest = _divided(rest, self.step)
        else:
            part, rest = _divided(rest, self.step)
            cut, rest = _divided(rest, self.apart)
        if rest or not (0 <= part < self.parts and 0 <= cut < self.cuts):
            return None
        return self._piece(part, cut)

    def find(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Rank, start and stop of the pieces that have elements of [low, high), in order."""
        for part in range(max(low - self.start, 0) // self.length, self.parts):
            begin = self.start + part * self.length
            if begin >= high:
                return
            for cut in range(max(low - begin, 0) // self.cut, self.cuts):
                piece = self._piece(part, cut)
                if piece is None or piece[0] >= high:
                    break
                yield self.rank + part * self.step + cut * self.apart, *piece

    def _piece(self, part: int, cut: int) -> tuple[int, int] | None:
        begin = self.start + part * self.length
        start = begin + cut * self.cut
        stop = min(start + self.cut, begin + self.length, self.stop)
        return (start, stop) if start < stop else None


def _divided(rest: int, step: int) -> tuple[int, int]:
    return divmod(rest, step) if step else (0, rest)


def require_cover(ranges: Iterable[tuple[int, int]], total: int) -> None:
    """Raise CoverageError unless the ranges are disjoint and together exactly [0, total)."""
    end = 0
    for start, stop in sorted(ranges):
        if start > end:
            raise CoverageError(f"elements {end} to {start} are missing")
        if start < end:
            raise CoverageError(f"elements {start} to {min(end, stop)} are there twice")
        end = stop
    if end != total:
        raise CoverageError(f"ends at element {end} of {total}")


def require_whole(runs: Iterable[Sequence[Run]], numels: Mapping[str, int], ranks: int) -> None:
    """Raise CoverageError, naming the tensor, unless the runs hold every tensor once, on existing
    ranks."""
    for own, (key, numel) in zip(runs, numels.items(), strict=True):
        try:
            require_cover([(run.start, run.stop) for run in own], numel)
        except CoverageError as error:
            raise CoverageError(f"{key}: {error}") from None
        for run in own:
            last = run.rank + (run.parts - 1) * run.step + (run.cuts - 1) * run.apart
            if not run.is_clear or last >= ranks:
                raise CoverageError(f"{key}: divided among ranks that do not exist")


_Parts = Mapping[tuple[int, int], Sequence[int]]
"""Ranks that hold each part (start, stop) of a tensor."""
_Ranks = Sequence[Sequence[int]]
"""Holders of each of a tensor's consecutive parts, all of one length and of as many holders."""


def share_writing(held: Sequence[Iterable[Span]], numels: Mapping[str, int]) -> list[list[Run]]:
    """The runs of every tensor, given each rank's spans and the tensors' numbers of elements.

    A range that several ranks hold is cut evenly between them; a small one goes to the holder with
    the least to write. Raises CoverageError when the spans do not make up the tensors.
    """
    holders: dict[str, dict[tuple[int, int], list[int]]]
    holders = {key: defaultdict(list) for key in numels}
    for rank, spans in enumerate(held):
        for key, start, stop in spans:
            holders[key][start, stop].append(rank)
    load = [0] * len(held)
    runs: dict[str, list[Run]] = {key: [] for key in numels}
    families = [(key, *family) for key, parts in holders.items() for family in _families(parts)]
    for key, start, stop, length, ranks in sorted(families, key=lambda family: -family[3]):
        runs[key] += _share(start, stop, length, ranks, load)
    for own in runs.values():
        own.sort()
    require_whole(runs.values(), numels, len(held))
    return list(runs.values())


def _families(parts: _Parts) -> Iterator[tuple[int, int, int, _Ranks]]:
    """Start, stop, length of a part, and ranks: of all parts together, if they are as regular as
    strategies cut them, else of each part."""
    ordered = sorted(parts)
    if not ordered:
        return
    first, stop = ordered[0][0], ordered[-1][1]
    length = ordered[0][1] - first
    begins = range(first, stop, length)
    regular = ordered == [(begin, min(begin + length, stop)) for begin in begins]
    ranks = [parts[part] for part in ordered]
    if regular and (len(ranks) == 1 or _steps(ranks)):
        yield first, stop, length, ranks
        return
    for (start, end), own in zip(ordered, ranks, strict=True):
        yield start, end, end - start, [own]


def _share(start: int, stop: int, length: int, ranks: _Ranks, load: list[int]) -> Iterator[Run]:
    """Divide a family among its holders; adds to the ranks' `load`, in elements."""
    if length < WORTH_A_CUT * len(ranks[0]):
        least = min(zip(*ranks, strict=True), key=lambda column: max(load[rank] for rank in column))
        ranks = [[rank] for rank in least]
    cut = -(-length // len(ranks[0]))
    for rank in (rank for row in ranks for rank in row):
        load[rank] += cut
    if (steps := _steps(ranks)) is not None:
        yield Run(start, stop, length, ranks[0][0], *steps)
        return
    for rank, low in zip(ranks[0], range(start, stop, cut), strict=False):
        high = min(low + cut, stop)
        yield Run(low, high, high - low, rank)


def _steps(ranks: _Ranks) -> tuple[int, int, int] | None:
    """Step from part to part, number of holders, and step from holder to holder; None if one run
    cannot express the ranks."""
    parts, holders, first = len(ranks), len(ranks[0]), ranks[0][0]
    step = ranks[1][0] - first if parts > 1 else 0
    apart = ranks[0][1] - first if holders > 1 else 0
    grid = [[first + part * step + cut * apart for cut in range(holders)] for part in range(parts)]
    is_clear = step >= 0 and Run(0, parts, 1, 0, step, holders, apart).is_clear
    return (step, holders, apart) if is_clear and grid == ranks else None
