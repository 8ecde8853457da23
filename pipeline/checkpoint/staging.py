"""Which memory a rank's share of a checkpoint passes through on its way to the writer.

Some is copied whole before training goes on. The rest passes in rounds through the two halves of a
memory of a given size: one is filled while the writer takes the other. Only the last two rounds are
still to be written when training goes on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pipeline.checkpoint.safetensors_format import BLOCK, ITEM_BYTES
from pipeline.checkpoint.writer_main import Write

if TYPE_CHECKING:
    from pipeline.checkpoint.file_layout import Layout, Span
    from pipeline.checkpoint.manifest import TensorEntry

PASSAGE = 1 << 30
"""Bytes of memory a rank, at most, for what passes."""
LONGEST_ITEM = max(ITEM_BYTES.values())
"""Divisor of all places, as they are viewed in their tensors' dtypes."""


class Copy(NamedTuple):
    """Elements [start, stop) of tensor `key`, which go to byte `place` of the snapshot buffer
    before the round of that number is written."""

    key: str
    start: int
    stop: int
    place: int
    round: int


@dataclass(frozen=True, kw_only=True)
class Staging:
    """Where each piece goes, and when."""

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


class _Item(NamedTuple):
    """A header or a piece."""

    file: int
    offset: int
    size: int
    span: Span | None
    """None: a header."""


def stage(
    layout: Layout,
    tensors: Mapping[str, TensorEntry],
    passes: Callable[[str], bool],
    passage: int = PASSAGE,
) -> Staging:
    """The staging of a layout. Tensors whose key `passes` take at most `passage` bytes."""
    items = list(_items(layout, tensors))
    fixed = [item for item in items if item.span is None or not passes(item.span.key)]
    edges = list(itertools.accumulate((_padded(item.size) for item in fixed), initial=0))
    places = {(item.file, item.offset): at for item, at in zip(fixed, edges, strict=False)}
    rounds = _Rounds(edges[-1], passage // 2 // BLOCK * BLOCK)
    whole = []
    for item in items:
        place = places.get((item.file, item.offset))
        if place is None:
            assert item.span is not None
            rounds.add(item, item.span, tensors[item.span.key].itemsize)
            continue
        rounds.writes[-1].append(Write(item.file, item.offset, place, item.size, bool(item.span)))
        if item.span is not None:
            whole.append(Copy(*item.span, place, 0))
    return Staging(
        size=rounds.end,
        heads=[(places[number, 0], head) for number, head in layout.heads.items()],
        whole=whole,
        passing=rounds.copies,
        rounds=rounds.writes,
    )


class _Rounds:
    """Pieces that pass, in the halves of a memory that begins at byte `base` of the buffer."""

    def __init__(self, base: int, half: int) -> None:
        self.end = base
        self.writes: list[list[Write]] = [[]]
        self.copies: list[Copy] = []
        self._base = base
        self._half = half
        self._used = 0

    def add(self, item: _Item, span: Span, itemsize: int) -> None:
        """Cut a piece to what fits, between blocks, so that their checksums stay the same."""
        done = 0
        while done < item.size:
            cut = min(item.size - done, self._half - self._used)
            if done + cut < item.size:
                cut -= cut % BLOCK
            if cut == 0:
                self.writes.append([])
                self._used = 0
                continue
            number = len(self.writes) - 1
            place = self._base + self._half * (number % 2) + self._used
            start, stop = (span.start + at // itemsize for at in (done, done + cut))
            self.writes[-1].append(Write(item.file, item.offset + done, place, cut, True))
            self.copies.append(Copy(span.key, start, stop, place, number))
            self._used += _padded(cut)
            self.end = max(self.end, place + _padded(cut))
            done += cut


def _items(layout: Layout, tensors: Mapping[str, TensorEntry]) -> Iterator[_Item]:
    """Headers and pieces, in the order in which they are written."""
    heads = dict(layout.heads)
    for span, file, offset in layout.pieces:
        if (head := heads.pop(file, None)) is not None:
            yield _Item(file, 0, len(head), None)
        yield _Item(file, offset, (span.stop - span.start) * tensors[span.key].itemsize, span)
    for file, head in heads.items():  # of files whose pieces are all other ranks'
        yield _Item(file, 0, len(head), None)


def _padded(size: int) -> int:
    return size + -size % LONGEST_ITEM
