"""Which memory a rank's share of a checkpoint passes through on its way to the writer.

Some is copied whole before training goes on. The rest passes in rounds through the two halves of a
memory of a given size: one is filled while the writer takes the other. Only the last two rounds are
still to be written when training goes on.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pipeline.checkpoint import safetensors_format
from pipeline.checkpoint.safetensors_format import ITEM_BYTES
from pipeline.checkpoint.writer_main import Write
from pipeline.utils.files import anonymous_file

if TYPE_CHECKING:
    from pipeline.checkpoint.division import Span
    from pipeline.checkpoint.layout import Layout
    from pipeline.checkpoint.manifest import TensorEntry


class SnapshotBuffer:
    """`size` bytes that a child process can map too (`descriptor`), all of them backed by memory
    from the start: no page fault ever stops the training loop."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor = anonymous_file("snapshot")
        os.truncate(self.descriptor, max(size, 1))
        self._map = mmap.mmap(self.descriptor, max(size, 1))
        self.memory = memoryview(self._map)[:size]
        zeros = bytes(1 << 20)
        for start in range(0, size, len(zeros)):
            part = self.memory[start : start + len(zeros)]
            part[:] = zeros[: len(part)]

    def close(self) -> None:
        """Give the memory back, once no view of it is left."""
        self.memory.release()
        self._map.close()
        os.close(self.descriptor)


PASSAGE = 1 << 30
"""Bytes a rank, at most, of what passes."""
LONGEST_ITEM = max(ITEM_BYTES.values())
"""Places are multiples of this, as they are viewed in their tensors' dtypes."""


class Copy(NamedTuple):
    """Elements [start, stop) of tensor `key`, which go to byte `place` of the arena before the
    round of that number is written."""

    key: str
    start: int
    stop: int
    place: int
    round: int


@dataclass(frozen=True, kw_only=True)
class Staging:
    """Where each piece goes, and when."""

    size: int
    """Bytes of the arena."""
    heads: list[tuple[int, bytes]]
    """Bytes at places of the arena that are the same at every save."""
    whole: list[Copy]
    """Copied before anything is written."""
    passing: list[Copy]
    """In the order of rounds."""
    rounds: list[list[Write]]
    """Pieces that are written: file by file, each from its start to its end."""


class _Item(NamedTuple):
    """A head or a piece."""

    file: int
    offset: int
    size: int
    span: Span | None
    """None: a head."""


def stage(
    layout: Layout,
    tensors: Mapping[str, TensorEntry],
    passes: Callable[[str], bool],
    passage: int = PASSAGE,
) -> Staging:
    """The staging of a layout. Tensors whose key `passes` take no more than `passage` bytes."""
    items = list(_items(layout, tensors))
    fixed = [item for item in items if item.span is None or not passes(item.span.key)]
    edges = list(itertools.accumulate((_padded(item.size) for item in fixed), initial=0))
    places = {(item.file, item.offset): at for item, at in zip(fixed, edges, strict=False)}
    rounds = _Rounds(edges[-1], passage // 2 // safetensors_format.BLOCK * safetensors_format.BLOCK)
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
    """Pieces that pass, in the halves of a memory that begins at `base` of the arena."""

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
                cut -= cut % safetensors_format.BLOCK
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
    """In the order in which they are written."""
    begun: set[int] = set()
    for span, file, offset in layout.pieces:
        if file not in begun and file in layout.heads:
            yield _Item(file, 0, len(layout.heads[file]), None)
        begun.add(file)
        yield _Item(file, offset, (span.stop - span.start) * tensors[span.key].itemsize, span)
    for file, head in layout.heads.items():
        if file not in begun:  # of which others write all pieces
            yield _Item(file, 0, len(head), None)


def _padded(size: int) -> int:
    return size + -size % LONGEST_ITEM
