"""Where the pieces of a checkpoint's tensors lie, in which file and behind which checksums."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.checkpoint import safetensors_format
from pipeline.checkpoint.division import LARGEST, Division, Run
from pipeline.checkpoint.manifest import Damaged, Manifest, Piece, TensorEntry


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
    """The pieces of one part in order, as columns."""

    tensor: NDArray[np.int64]
    file: NDArray[np.int64]
    offset: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    first_sum: NDArray[np.int64]
    """And one more: how many sums there are."""


class Places:
    """Places of one manifest, computed where they are asked about."""

    def __init__(self, manifest: Manifest, where: str) -> None:
        self._manifest = manifest
        self._where = where
        self._numbers = {entry.key: number for number, entry in enumerate(manifest.tensors)}
        self._division = Division(_listed(manifest) if manifest.version == 1 else manifest.runs)
        self._itemsizes = np.array([entry.itemsize for entry in manifest.tensors], dtype=np.int64)
        shared = [-1 if entry.file is None else entry.file for entry in manifest.tensors]
        self._shared = np.array(shared, dtype=np.int64)
        self._begin = self._begins()
        self._tables: dict[int, tuple[_Table, NDArray[np.int64], NDArray[np.int64]]] = {}

    def find(self, key: str, low: int, high: int) -> Iterator[Place]:
        """The pieces that have elements [low, high) of a tensor, in order."""
        number = self._numbers[key]
        for part, start, stop in self._division.find(number, low, high):
            table, keys, order = self._table(part)
            place = int(order[np.searchsorted(keys, number * LARGEST + start)])
            yield Place(
                start, stop, int(table.file[place]), int(table.offset[place]), part,
                int(table.first_sum[place]),
            )  # fmt: skip

    def in_file(self, number: int) -> list[tuple[TensorEntry, Piece]]:
        """Pieces that lie in a file."""
        if self._manifest.version == 1:
            return self._listed_in_file[number]
        tensors = self._manifest.tensors
        if (self._shared == number).any():
            return [
                (tensors[at], Piece(at, number, int(self._begin[at]), 0, tensors[at].numel))
                for at in np.flatnonzero(self._shared == number).tolist()
            ]
        table, _, _ = self._table(number)
        rows = zip(*(column.tolist() for column in table[:5]), strict=True)
        return [(tensors[row[0]], Piece(*row)) for row in rows if row[1] == number]

    def sums(self, part: int) -> int:
        """How many checksums a part has."""
        return int(self._table(part)[0].first_sum[-1])

    @functools.cached_property
    def longest(self) -> int:
        """Bytes of the longest piece, at most."""
        runs = zip(self._division.runs, self._itemsizes.tolist(), strict=True)
        return max((run.cut * size for own, size in runs for run in own), default=0)

    @functools.cached_property
    def _listed_in_file(self) -> list[list[tuple[TensorEntry, Piece]]]:
        found: list[list[tuple[TensorEntry, Piece]]] = [[] for _ in self._manifest.files]
        for part in self._manifest.parts:
            for piece in part.pieces:
                found[piece.file].append((self._manifest.tensors[piece.tensor], piece))
        return found

    def _begins(self) -> NDArray[np.int64]:
        """First byte of every tensor that lies in a file whole. Raises Damaged when one does not
        fit."""
        manifest, begins = self._manifest, np.zeros(len(self._shared), dtype=np.int64)
        ends = [file.data_start for file in manifest.files]
        for number, entry in enumerate(manifest.tensors):
            if entry.file is not None:
                begins[number] = ends[entry.file]
                ends[entry.file] += entry.numel * entry.itemsize
        for number, file in enumerate(manifest.files):
            if (self._shared == number).any() and ends[number] != file.size:
                raise Damaged(f"{self._where}: {file.name}: its tensors do not fill it")
        return begins

    def _table(self, part: int) -> tuple[_Table, NDArray[np.int64], NDArray[np.int64]]:
        """A part's pieces; their keys of tensor and start in order, and which has each."""
        if part not in self._tables:
            made = self._listed(part) if self._manifest.version == 1 else self._ruled(part)
            keys = made.tensor * LARGEST + made.start
            order = np.argsort(keys, kind="stable")
            self._tables[part] = made, keys[order], order
        return self._tables[part]

    def _listed(self, part: int) -> _Table:
        pieces = self._manifest.parts[part].pieces
        tensor, file, offset, start, stop = np.array(pieces, dtype=np.int64).reshape(-1, 5).T
        sizes = (stop - start) * self._itemsizes[tensor]
        return _Table(tensor, file, offset, start, stop, _first_sums(sizes))

    def _ruled(self, part: int) -> _Table:
        tensor, start, stop = self._division.of(part)
        itemsize, shared = self._itemsizes[tensor], self._shared[tensor]
        size = (stop - start) * itemsize
        offset = self._begin[tensor] + start * itemsize
        if (own := shared < 0).any():
            file = self._manifest.files[part]
            ends = file.data_start + np.cumsum(size[own])
            offset[own] = ends - size[own]
            if int(ends[-1]) != file.size:
                raise Damaged(f"{self._where}: {file.name}: its tensors do not fill it")
        return _Table(
            tensor, np.where(shared < 0, part, shared), offset, start, stop, _first_sums(size)
        )


def _first_sums(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(-(-sizes // safetensors_format.BLOCK))]).astype(np.int64)


def _listed(manifest: Manifest) -> list[list[Run]]:
    """Each piece that version 1 lists, as a run of its own."""
    runs: list[list[Run]] = [[] for _ in manifest.tensors]
    for rank, part in enumerate(manifest.parts):
        for piece in part.pieces:
            length = piece.stop - piece.start
            runs[piece.tensor].append(Run(piece.start, piece.stop, length, rank))
    return [sorted(own) for own in runs]
