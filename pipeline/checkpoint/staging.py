"""Staging of a rank's share of a checkpoint in memory, on its way to the writer.

Some is copied whole before training goes on. The rest passes in rounds through the two halves of a
memory of a given size: one is filled while the writer takes the other. Only the last two rounds are
still unwritten when training goes on.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pipeline.checkpoint.block_sums import BLOCK
from pipeline.checkpoint.writer_protocol import Write
from pipeline.utils.files import PAGE

if TYPE_CHECKING:
    from pipeline.checkpoint.division import KeyedTile
    from pipeline.checkpoint.file_layout import Item, Layout

PASSAGE = 1 << 30
"""Bytes of memory a rank, at most, for what passes; two pages more where places in files ask for
them."""


class Copy(NamedTuple):
    """Elements of the part that this rank holds of tensor `key`: `numel` that follow each other in
    it, the first of which is number `start` of the tensor. They go to byte `place` of the snapshot
    buffer before the round of that number is written."""

    key: str
    start: int
    numel: int
    place: int
    round: int


@dataclass(frozen=True, kw_only=True)
class Staging:
    """The place of each piece in the snapshot buffer, and its round."""

    size: int
    """Bytes of the snapshot buffer."""
    heads: list[tuple[int, bytes]]
    """Places in the buffer, and bytes there that are the same at every save."""
    whole: list[Copy]
    """Copies to make before anything is written."""
    passing: list[Copy]
    """Copies to make round by round, in order."""
    rounds: list[list[Write]]
    """Pieces that are written: file by file, each from its start to its end."""


def plan_staging(layout: Layout, passing: Set[str], passage: int = PASSAGE) -> Staging:
    """The staging of a layout. Tensors whose keys are `passing` take at most `passage` bytes."""
    places, end = {}, 0
    for item in layout.items:
        if item.span is None or item.span.key not in passing:
            places[item] = _place(end, item.extent.offset)
            end = places[item] + item.size
    rounds = _Rounds(_place(end, 0), passage // 2 // BLOCK * BLOCK)
    for item in layout.items:
        if item in places:
            write = Write(item.file, item.extent, 0, places[item], item.size, bool(item.span))
            rounds.writes[-1].append(write)
        elif item.span is not None:
            rounds.add(item, item.span)
    return Staging(
        size=rounds.end,
        heads=[(place, item.head) for item, place in places.items() if item.span is None],
        whole=[
            Copy(item.span.key, item.span.start, item.span.tile.numel, place, 0)
            for item, place in places.items()
            if item.span
        ],
        passing=rounds.copies,
        rounds=rounds.writes,
    )


class _Rounds:
    """Pieces that pass, in the halves of a memory that begins at byte `base` of the buffer. A half
    is a page larger than `half`, as its first piece may begin in the middle of one."""

    def __init__(self, base: int, half: int) -> None:
        self.end = base
        self.writes: list[list[Write]] = [[]]
        self.copies: list[Copy] = []
        self._base = base
        self._half = half + PAGE
        self._used = 0

    def add(self, item: Item, span: KeyedTile) -> None:
        """Cut a piece to what fits, between blocks, so that their checksums stay the same."""
        done, itemsize = 0, item.size // span.tile.numel
        while done < item.size:
            number = len(self.writes) - 1
            start = self._base + self._half * (number % 2)
            place = _place(start + self._used, item.extent.offset + done)
            cut = min(item.size - done, start + self._half - place)
            if done + cut < item.size:
                cut -= cut % BLOCK
            if cut <= 0:
                self.writes.append([])
                self._used = 0
                continue
            first = span.tile.element(done // itemsize)
            self.writes[-1].append(Write(item.file, item.extent, done, place, cut, True))
            self.copies.append(Copy(span.key, first, cut // itemsize, place, number))
            self._used = place + cut - start
            self.end = max(self.end, place + cut)
            done += cut


def _place(edge: int, offset: int) -> int:
    """The first place from `edge` on that is as far behind the start of a page as `offset` in the
    file: so the disk can fetch a piece from there, and its elements lie as their dtype demands."""
    return edge + (offset - edge) % PAGE
