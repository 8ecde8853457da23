"""Places of the pieces of tensors: their files, bytes and checksums, by the manifest's rules."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pipeline.checkpoint.block_sums import count
from pipeline.checkpoint.manifest import LARGEST, Damaged, Manifest, Piece


class Place(NamedTuple):
    """Elements [start, stop) of a tensor, from byte `offset` of a file on."""

    start: int
    stop: int
    file: int
    offset: int
    part: int
    first_sum: int
    """Number of its first block's checksum among those of the part."""


class _Table(NamedTuple):
    """The pieces of one part as columns, in the order of `key`: tensor and first element."""

    sums: int
    """Number of checksums of the part."""
    key: array[int]
    file: array[int]
    offset: array[int]
    first_sum: array[int]


class Places:
    """Places of one manifest, computed where they are asked about. Raises Damaged, naming `where`,
    for tensors that do not fill their files."""

    def __init__(self, manifest: Manifest, where: str) -> None:
        self._manifest = manifest
        self._where = where
        self._numbers = {entry.key: number for number, entry in enumerate(manifest.tensors)}
        self._runs = manifest.division()
        self._whole = self._whole_tensors()
        self._tables: dict[int, _Table] = {}

    def find(self, key: str, low: int, high: int) -> Iterator[Place]:
        """The pieces that have elements [low, high) of a tensor, in order."""
        number = self._numbers[key]
        runs = self._runs[number]
        first = bisect_right(runs, low, key=lambda run: run.start) - 1
        for run in runs[max(first, 0) :]:
            if run.start >= high:
                return
            for part, start, stop in run.find(low, high):
                found = self._table(part)
                at = bisect_left(found.key, number * LARGEST + start)
                file, offset, first_sum = found.file[at], found.offset[at], found.first_sum[at]
                yield Place(start, stop, file, offset, part, first_sum)

    def sums(self, part: int) -> int:
        """Number of checksums of a part."""
        return self._table(part).sums

    def _whole_tensors(self) -> dict[int, Piece]:
        """By number, the tensors that lie in a file whole, one behind the other."""
        found = {}
        ends = [file.data_start for file in self._manifest.files]
        for number, entry in enumerate(self._manifest.tensors):
            if entry.file is not None:
                found[number] = Piece(number, entry.file, ends[entry.file], 0, entry.numel)
                ends[entry.file] += entry.nbytes
        for file in {piece.file for piece in found.values()}:
            self._require_full(file, ends[file])
        return found

    def _require_full(self, number: int, end: int) -> None:
        file = self._manifest.files[number]
        if end != file.size:
            raise Damaged(f"{self._where}: {file.name}: its tensors do not fill it")

    def _table(self, part: int) -> _Table:
        if part not in self._tables:
            rows, sums = [], 0
            for tensor, file, offset, start, stop in self._pieces(part):
                rows.append((tensor * LARGEST + start, file, offset, sums))
                sums += count((stop - start) * self._manifest.tensors[tensor].itemsize)
            rows.sort()
            columns = (array("Q", [row[field] for row in rows]) for field in range(4))
            self._tables[part] = _Table(sums, *columns)
        return self._tables[part]

    def _pieces(self, part: int) -> Iterable[Piece]:
        """The pieces that a rank wrote, in the order of their checksums."""
        if self._manifest.version == 1:
            return self._manifest.parts[part].pieces
        return self._ruled(part)

    def _ruled(self, part: int) -> Iterator[Piece]:
        end = 0
        for number, entry in enumerate(self._manifest.tensors):
            for start, stop in filter(None, (run.of(part) for run in self._runs[number])):
                if number in self._whole:
                    _, file, begin, *_ = self._whole[number]
                    yield Piece(number, file, begin + start * entry.itemsize, start, stop)
                    continue
                end = end or self._manifest.files[part].data_start
                yield Piece(number, part, end, start, stop)
                end += (stop - start) * entry.itemsize
        if end:
            self._require_full(part, end)
