"""Places of the pieces of tensors: their ranks, files, bytes and checksums.

Importing this imports no numpy, which only computing places needs.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pipeline.checkpoint.manifest import LARGEST, Damaged, Manifest, Piece, Run, TensorEntry
from pipeline.checkpoint.safetensors_format import BLOCK, Placed, table
from pipeline.contracts.engine import WEIGHT

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Column = NDArray[np.int64]


class Pieces(NamedTuple):
    """Ranges of tensors by their numbers, as columns of one length."""

    tensor: Column
    start: Column
    stop: Column


class Division:
    """The runs of every tensor, in order."""

    def __init__(self, runs: Sequence[Sequence[Run]]) -> None:
        self.runs = runs

    @functools.cached_property
    def _columns(self) -> Column:
        """Shape (10, runs): the tensor's number and each run's fields, parts and cut."""
        import numpy as np

        every = [(number, run) for number, own in enumerate(self.runs) for run in own]
        columns = [[number, *run, run.parts, run.cut] for number, run in every]
        return np.array(columns, dtype=np.int64).reshape(-1, 10).T

    def find(self, tensor: int, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Rank, start and stop of the pieces that have elements [low, high) of a tensor."""
        own = self.runs[tensor]
        place = bisect_right(own, low, key=lambda run: run.start) - 1
        for run in own[max(place, 0) :]:
            if run.start >= high:
                return
            if low < run.stop:
                yield from _pieces(run, low, high)

    def of(self, rank: int) -> Pieces:
        """The pieces of a rank, by tensor and start."""
        import numpy as np

        tensor, start, stop, length, first, step, cuts, apart, parts, cut = self._columns
        swapped = apart > step
        outer, inner = np.maximum(step, apart), np.minimum(step, apart)
        rest = rank - first
        many = np.where(outer > 0, rest // np.maximum(outer, 1), 0)
        few = np.where(inner > 0, (rest - many * outer) // np.maximum(inner, 1), 0)
        part, place = np.where(swapped, few, many), np.where(swapped, many, few)
        there = (rest >= 0) & (many * outer + few * inner == rest) & (part < parts) & (place < cuts)
        begin = start + part * length
        low = begin + place * cut
        high = np.minimum(np.minimum(low + cut, begin + length), stop)
        there &= low < high
        return Pieces(tensor[there], low[there], high[there])


def _pieces(run: Run, low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """Rank, start and stop of the run's pieces that have elements of [low, high), in order."""
    for part in range(max(low - run.start, 0) // run.length, run.parts):
        begin = run.start + part * run.length
        end = min(begin + run.length, run.stop)
        for cut in range(max(low - begin, 0) // run.cut, run.cuts):
            start = begin + cut * run.cut
            if start >= min(end, high):
                break
            yield run.rank + part * run.step + cut * run.apart, start, min(start + run.cut, end)
        if end >= high:
            return


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

    tensor: Column
    file: Column
    offset: Column
    start: Column
    stop: Column
    first_sum: Column
    key: Column
    sums: int
    """Number of checksums of the part."""


class Places:
    """Places of one manifest, computed where they are asked about. Raises Damaged, naming `where`,
    for tensors that do not fill their files."""

    def __init__(self, manifest: Manifest, where: str) -> None:
        import numpy as np

        self._manifest = manifest
        self._where = where
        self._numbers = {entry.key: number for number, entry in enumerate(manifest.tensors)}
        self._division = Division(manifest.division())
        self._itemsizes = np.array([entry.itemsize for entry in manifest.tensors], dtype=np.int64)
        shared = [-1 if entry.file is None else entry.file for entry in manifest.tensors]
        self._shared = np.array(shared, dtype=np.int64)
        self._begin = self._begins()
        self._tables: dict[int, _Table] = {}

    def find(self, key: str, low: int, high: int) -> Iterator[Place]:
        """The pieces that have elements [low, high) of a tensor, in order."""
        number = self._numbers[key]
        for part, start, stop in self._division.find(number, low, high):
            found = self._table(part)
            at = int(found.key.searchsorted(number * LARGEST + start))
            file, offset, first_sum = (
                int(column[at]) for column in (found.file, found.offset, found.first_sum)
            )
            yield Place(start, stop, file, offset, part, first_sum)

    def in_file(self, number: int) -> list[tuple[TensorEntry, Piece]]:
        """Pieces that lie in a file."""
        manifest = self._manifest
        if (whole := (self._shared == number).nonzero()[0]).size:
            begins = ((at, int(self._begin[at])) for at in whole.tolist())
            pieces = [Piece(at, number, b, 0, manifest.tensors[at].numel) for at, b in begins]
        else:
            parts = range(len(manifest.parts)) if manifest.version == 1 else [number]
            pieces = [piece for part in parts for piece in self._in_part(part, number)]
        return [(manifest.tensors[piece.tensor], piece) for piece in pieces]

    def sums(self, part: int) -> int:
        """Number of checksums of a part."""
        return self._table(part).sums

    def _in_part(self, part: int, file: int) -> Iterator[Piece]:
        found = self._table(part)
        here = found.file == file
        yield from map(Piece, *(column[here].tolist() for column in found[:5]))

    def _begins(self) -> Column:
        """First byte of every tensor that lies in a file whole."""
        import numpy as np

        manifest, begins = self._manifest, np.zeros(len(self._shared), dtype=np.int64)
        ends = [file.data_start for file in manifest.files]
        for number, entry in enumerate(manifest.tensors):
            if entry.file is not None:
                begins[number] = ends[entry.file]
                ends[entry.file] += entry.nbytes
        for number in set(self._shared.tolist()) - {-1}:
            self._require_full(number, ends[number])
        return begins

    def _require_full(self, number: int, end: int) -> None:
        file = self._manifest.files[number]
        if end != file.size:
            raise Damaged(f"{self._where}: {file.name}: its tensors do not fill it")

    def _table(self, part: int) -> _Table:
        import numpy as np

        if part not in self._tables:
            rows = self._listed(part) if self._manifest.version == 1 else self._ruled(part)
            tensor, _, _, start, stop = rows
            blocks = -(-(stop - start) * self._itemsizes[tensor] // BLOCK)
            first_sum, key = np.cumsum(blocks) - blocks, tensor * LARGEST + start
            order = np.argsort(key)
            tensor, file, offset, start, stop = (column[order] for column in rows)
            self._tables[part] = _Table(
                tensor, file, offset, start, stop, first_sum[order], key[order], int(blocks.sum())
            )
        return self._tables[part]

    def _listed(self, part: int) -> Column:
        import numpy as np

        return np.array(self._manifest.parts[part].pieces, dtype=np.int64).reshape(-1, 5).T

    def _ruled(self, part: int) -> tuple[Column, ...]:
        import numpy as np

        tensor, start, stop = self._division.of(part)
        itemsize, shared = self._itemsizes[tensor], self._shared[tensor]
        size = (stop - start) * itemsize
        offset = self._begin[tensor] + start * itemsize
        if (own := shared < 0).any():
            ends = self._manifest.files[part].data_start + np.cumsum(size[own])
            offset[own] = ends - size[own]
            self._require_full(part, int(ends[-1]))
        return tensor, np.where(shared < 0, part, shared), offset, start, stop


def header_mismatch(head: bytes, pieces: Iterable[tuple[TensorEntry, Piece]]) -> str:
    """Disagreement between a file's header and its pieces in the manifest; empty if none.

    `head` is all that precedes the file's data. Raises ValueError when it is no header.
    """
    entries = table(head)
    named = set()
    for tensor, piece in pieces:
        begin = piece.offset - len(head)
        length = piece.stop - piece.start
        name = f"{tensor.key}@{piece.start}"
        expected = Placed(tensor.dtype, (length,), begin, begin + length * tensor.itemsize)
        if name not in entries:
            begin -= piece.start * tensor.itemsize
            name = tensor.key if tensor.key in entries else tensor.key.removeprefix(f"{WEIGHT}/")
            expected = Placed(tensor.dtype, tensor.shape, begin, begin + tensor.nbytes)
        if entries.get(name) != expected:
            return f"{tensor.key} is not where the manifest says"
        named.add(name)
    unnamed = entries.keys() - named
    return f"{min(unnamed)} is not in the manifest" if unnamed else ""
