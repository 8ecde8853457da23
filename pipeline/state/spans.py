"""Arithmetic on half-open ranges of a flattened tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

WHOLE = 1 << 18
"""Elements; a share below that is not worth a cut."""


class Span(NamedTuple):
    """Elements [start, stop) of the logical tensor `key`."""

    key: str
    start: int
    stop: int


class Misfit(ValueError):
    """Ranges overlap, leave a gap, or reach beyond the tensor."""


def require_cover(ranges: Iterable[tuple[int, int]], total: int) -> None:
    """Raise Misfit unless the ranges are disjoint and together exactly [0, total)."""
    end = 0
    for start, stop in sorted(ranges):
        if start > end:
            raise Misfit(f"elements {end} to {start} are missing")
        if start < end:
            raise Misfit(f"elements {start} to {min(end, stop)} are there twice")
        end = stop
    if end != total:
        raise Misfit(f"ends at element {end} of {total}")


def share_writing(held: Sequence[Sequence[Span]]) -> list[list[Span]]:
    """Who writes what, given what each rank holds: everything once, replicas sharing the work.

    A range that several ranks hold is cut evenly between them; a small one goes whole to the
    holder with the least to write. Every rank computes the same answer, and writes in the order
    in which it holds.
    """
    holders: dict[Span, list[int]] = {}
    for rank, spans in enumerate(held):
        for span in spans:
            holders.setdefault(span, []).append(rank)
    load = [0] * len(held)
    writers: dict[Span, dict[int, Span]] = {}
    for span in sorted(holders, key=lambda span: span.start - span.stop):
        writers[span] = _cut(span, holders[span], load)
        for rank, part in writers[span].items():
            load[rank] += part.stop - part.start
    return [
        [writers[span][rank] for span in spans if rank in writers[span]]
        for rank, spans in enumerate(held)
    ]


def _cut(span: Span, ranks: Sequence[int], load: Sequence[int]) -> dict[int, Span]:
    """Writing rank -> its part of `span`."""
    length = span.stop - span.start
    if length < WHOLE * len(ranks):
        return {min(ranks, key=lambda rank: (load[rank], rank)): span}
    edges = [span.start + length * place // len(ranks) for place in range(len(ranks) + 1)]
    return {
        rank: Span(span.key, start, stop)
        for rank, start, stop in zip(ranks, edges, edges[1:], strict=False)
    }
