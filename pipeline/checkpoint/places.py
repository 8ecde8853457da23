"""Places of the pieces of tensors: their files, bytes and checksums, by the manifest's rules."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pipeline.checkpoint.block_sums import count
from pipeline.checkpoint.division import Run, row_width
from pipeline.checkpoint.manifest import LARGEST, Damaged, Manifest
from pipeline.checkpoint.tiles import Extent, Tile, overlaps


class Place(NamedTuple):
    """A piece of a tensor and its bytes, which lie in file number `file`."""

    tile: Tile
    file: int
    extent: Extent
    part: int
    first_sum: int
    """Number of its first block's checksum among those of the part."""


class _Piece(NamedTuple):
    """Elements of a tensor, of which `start` is the first, from byte `offset` of a file on."""

    tensor: int
    file: int
    offset: int
    start: int
    numel: int


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
        self._whole: dict[int, tuple[int, int]] = {}
        """By number, file and first byte of the tensors that lie in a file whole, one after the
        other."""
        ends = [file.data_start for file in manifest.files]
        for number, entry in enumerate(manifest.tensors):
            if entry.file is not None:
                self._whole[number] = entry.file, ends[entry.file]
                ends[entry.file] += entry.nbytes
        for file in {file for file, _ in self._whole.values()}:
            self._require_full(file, ends[file])
        self._tables: dict[int, _Table] = {}
        self._widths: dict[int, int] = {}

    def width(self, key: str) -> int:
        """Elements of the rows by whose columns a tensor is divided; 0 if its pieces are flat."""
        number = self._numbers[key]
        if number not in self._widths:
            self._widths[number] = row_width(self._runs[number])
        return self._widths[number]

    def find(self, key: str, wanted: Tile) -> Iterator[Place]:
        """The pieces that have elements of a tile, in the order of their first ones. The stride of
        the tile is the tensor's `width`, or one of them is 0."""
        number, width = self._numbers[key], self.width(key)
        runs, low, high = self._runs[number], wanted.start, wanted.end
        pieces: Iterable[tuple[int, Tile]] = _in_order(runs, low, high)
        if width and not all(run.has_whole_rows for run in runs):  # may lie next to each other
            found = [piece for run in runs for piece in run.find(low, high)]
            pieces = sorted(found, key=lambda piece: piece[1])
        width = width or wanted.stride or max(self._manifest.tensors[number].numel, 1)
        for rank, tile in pieces:
            if any(overlaps(tile, wanted, width)):
                table = self._table(rank)
                at = bisect_left(table.key, number * LARGEST + tile.start)
                offset, itemsize = table.offset[at], self._manifest.tensors[number].itemsize
                extent = Extent.of(tile, offset, itemsize, whole=number in self._whole)
                yield Place(tile, table.file[at], extent, rank, table.first_sum[at])

    def sums(self, part: int) -> int:
        """Number of checksums of a part."""
        return self._table(part).sums

    def _require_full(self, number: int, end: int) -> None:
        file = self._manifest.files[number]
        if end != file.size:
            raise Damaged(f"{self._where}: {file.name}: its tensors do not fill it")

    def _table(self, part: int) -> _Table:
        if part not in self._tables:
            rows, sums = [], 0
            for tensor, file, offset, start, numel in self._pieces(part):
                rows.append((tensor * LARGEST + start, file, offset, sums))
                sums += count(numel * self._manifest.tensors[tensor].itemsize)
            rows.sort()
            columns = (array("Q", [row[field] for row in rows]) for field in range(4))
            self._tables[part] = _Table(sums, *columns)
        return self._tables[part]

    def _pieces(self, part: int) -> Iterator[_Piece]:
        """The pieces that a rank wrote, in the order of their checksums."""
        if self._manifest.version == 1:
            for piece in self._manifest.parts[part].pieces:
                yield _Piece(*piece[:4], piece.stop - piece.start)
            return
        end = 0
        for number, entry in enumerate(self._manifest.tensors):
            for tile in filter(None, (run.of(part) for run in self._runs[number])):
                if number in self._whole:
                    file, begin = self._whole[number]
                    begin += tile.start * entry.itemsize
                    yield _Piece(number, file, begin, tile.start, tile.numel)
                    continue
                end = end or self._manifest.files[part].data_start
                yield _Piece(number, part, end, tile.start, tile.numel)
                end += tile.numel * entry.itemsize
        if end:
            self._require_full(part, end)


def _in_order(runs: list[Run], low: int, high: int) -> Iterator[tuple[int, Tile]]:
    """Rank and tile of the pieces in the rows that have elements [low, high), of runs that are
    ranges, one after the other."""
    first = bisect_right(runs, low, key=lambda run: run.start) - 1
    for run in runs[max(first, 0) :]:
        if run.start >= high:
            return
        yield from run.find(low, high)
