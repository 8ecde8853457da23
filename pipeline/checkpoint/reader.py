"""Read any range of any tensor of a committed checkpoint, verified block by block."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from pipeline.checkpoint import safetensors_format
from pipeline.checkpoint.manifest import (
    FILE,
    FIRST_SUMS,
    Damaged,
    DataFile,
    Manifest,
    Piece,
    TensorEntry,
)
from pipeline.checkpoint.places import Place, Places
from pipeline.checkpoint.safetensors_format import Placed, table
from pipeline.checkpoint.state_source import StateSource
from pipeline.checkpoint.store import Source, Store, step_number
from pipeline.contracts.engine import WEIGHT
from pipeline.errors import CheckpointError
from pipeline.utils.files import page_aligned

SUMS_IN_MEMORY = 64 << 20
"""Bytes; the checksums of larger states are read where they are needed."""


class _Chunk(NamedTuple):
    """A run of whole blocks: `length` bytes from byte `start` of a piece on, of which those in
    [first, last) are wanted."""

    start: int
    length: int
    first: int
    last: int


class CheckpointReader(StateSource):
    """One committed checkpoint. Raises Damaged, naming file and tensor, for whatever is not as it
    was written; CheckpointError when it cannot be read for another reason, or is none of ours."""

    def __init__(self, store: Store, name: str) -> None:
        self.name = name
        self._store = store
        self.where = store.locate(name)
        where = store.locate(name, FILE)
        with _explained(where):
            if store.size(name, FILE) is None and store.size(name, FIRST_SUMS) is None:
                raise CheckpointError(f"{self.where}: no checkpoint: it holds no {FILE}")
            data = store.get(name, FILE)
        self.manifest = Manifest.load(data, where)
        self.step = self.manifest.step
        if step_number(name) not in (None, self.step):
            raise Damaged(f"{where}: of step {self.step}, in a folder that was renamed or copied")
        self.world_size = self.manifest.world_size
        self.writer = self.manifest.writer
        self.progress = self.manifest.progress
        self.state = self.manifest.state
        self.tensors: Mapping[str, TensorEntry] = {t.key: t for t in self.manifest.tensors}
        self.bytes_read = 0
        self._places = Places(self.manifest, where)
        self._sources: dict[int, Source] = {}
        self._sums: dict[int, memoryview] = {}
        self._sum_sources: dict[int, Source] = {}
        total = sum(entry.numel * entry.itemsize for entry in self.manifest.tensors)
        self._sums_fit = (
            safetensors_format.count(total) * safetensors_format.SUM_BYTES <= SUMS_IN_MEMORY
        )
        self._buffer = page_aligned(min(safetensors_format.CHUNK, self._places.longest))

    def close(self) -> None:
        for source in (*self._sources.values(), *self._sum_sources.values()):
            source.close()
        self._sources.clear()
        self._sum_sources.clear()

    def read(self, key: str, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        for piece, low, high in self._stored(key, start, stop):
            yield from self._read_piece(key, piece, low, high)

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        size = self.entry(key).itemsize
        for piece, low, high in self._stored(key, start, start + len(out) // size):
            self._fill(key, piece, low, out[(low - start) * size : (high - start) * size])

    def read_bytes(self, key: str) -> bytes:
        """A whole small tensor."""
        return b"".join(bytes(data) for _, data in self.read(key, 0, self.entry(key).numel))

    def require_files(self) -> None:
        """Every file is there and has its size."""
        for file in self.manifest.files:
            self._require_size(file.name, file.size)
        for number, part in enumerate(self.manifest.parts):
            self._require_size(part.sums, self._places.sums(number) * safetensors_format.SUM_BYTES)

    def require_headers(self) -> None:
        """Every file is there and begins as it should."""
        self.require_files()
        for number in range(len(self.manifest.files)):
            self._source(number)

    def verify(self, advance: Callable[[int], object] = lambda count: None) -> None:
        """Read everything; `advance` is told the bytes of tensors that were good."""
        self.require_headers()
        for key, entry in self.tensors.items():
            for _, data in self.read(key, 0, entry.numel):
                advance(len(data))

    def _stored(self, key: str, start: int, stop: int) -> Iterator[tuple[Place, int, int]]:
        """Pieces that hold elements of [start, stop), and which of the tensor's elements."""
        numel = self.entry(key).numel
        if not 0 <= start <= stop <= numel:
            raise CheckpointError(
                f"{self.where}: {key} has {numel} elements, {start} to {stop} were asked for"
            )
        for piece in self._places.find(key, start, stop):
            yield piece, max(start, piece.start), min(stop, piece.stop)

    def _read_piece(
        self, key: str, piece: Place, low: int, high: int
    ) -> Iterator[tuple[int, memoryview]]:
        itemsize = self.tensors[key].itemsize
        for chunk in _chunks(piece, low, high, itemsize):
            data = self._buffer[: chunk.length]
            self._read_blocks(key, piece, chunk.start, data)
            element = piece.start + (chunk.start + chunk.first) // itemsize
            yield element, data[chunk.first : chunk.last]

    def _fill(self, key: str, piece: Place, low: int, out: memoryview) -> None:
        """Read from element `low` of the tensor on; whole blocks go right to where they belong."""
        itemsize, done = self.tensors[key].itemsize, 0
        for chunk in _chunks(piece, low, low + len(out) // itemsize, itemsize):
            target = out[done : done + chunk.last - chunk.first]
            data = target if len(target) == chunk.length else self._buffer[: chunk.length]
            self._read_blocks(key, piece, chunk.start, data)
            if data is not target:
                target[:] = data[chunk.first : chunk.last]
            done += len(target)

    def _read_blocks(self, key: str, piece: Place, begin: int, into: memoryview) -> None:
        """Fill `into` with whole blocks of the piece, from its byte `begin` on."""
        file = self.manifest.files[piece.file]
        try:
            source = self._source(piece.file, key)
            with _explained(self._locate(file, key)):
                count = source.read(piece.offset + begin, into)
            self.bytes_read += count
            if count < len(into):
                raise Damaged(f"{self._locate(file, key)}: truncated")
            first = piece.first_sum + begin // safetensors_format.BLOCK
            expected = self._expected(piece.part, first, safetensors_format.count(len(into)))
            wrong = safetensors_format.first_wrong(into, expected)
            if wrong is not None:
                at = piece.offset + begin + wrong * safetensors_format.BLOCK
                raise Damaged(f"{self._locate(file, key)}: damaged near byte {at}")
        except Damaged as error:
            error.key = key
            raise

    def _source(self, number: int, key: str = "") -> Source:
        if number not in self._sources:
            file = self.manifest.files[number]
            where = self._locate(file, key)
            self._require_size(file.name, file.size, key)
            with _explained(where):
                source = self._store.open(self.name, file.name)
                self._sources[number] = source
                head = memoryview(bytearray(file.data_start))
                count = source.read(0, head)
            if count < len(head) or xxh3_64_intdigest(head) != file.header:
                raise Damaged(f"{where}: its header is damaged")
            self._require_agreement(bytes(head), number, where)
        return self._sources[number]

    def _require_agreement(self, head: bytes, number: int, where: str) -> None:
        try:
            problem = contradiction(head, self._places.in_file(number))
        except ValueError as error:
            raise Damaged(f"{where}: its header cannot be read: {error}") from error
        if problem:
            raise Damaged(f"{where}: {problem}")

    def _expected(self, number: int, first: int, count: int) -> memoryview:
        """Checksums of consecutive blocks of a part."""
        if self._sums_fit:
            return self._sums_of(number)[first : first + count]
        # A wrong one would not agree with its block, so nothing goes unnoticed.
        part = self.manifest.parts[number]
        where = self._store.locate(self.name, part.sums)
        data = memoryview(bytearray(count * safetensors_format.SUM_BYTES))
        with _explained(where):
            if number not in self._sum_sources:
                self._sum_sources[number] = self._store.open(self.name, part.sums)
            found = self._sum_sources[number].read(first * safetensors_format.SUM_BYTES, data)
        if found < len(data):
            raise Damaged(f"{where}: truncated")
        return safetensors_format.unpack(bytes(data))

    def _sums_of(self, number: int) -> memoryview:
        if number not in self._sums:
            part = self.manifest.parts[number]
            where = self._store.locate(self.name, part.sums)
            with _explained(where):
                data = self._store.get(self.name, part.sums)
            if xxh3_64_intdigest(data) != part.digest:
                raise Damaged(f"{where}: damaged")
            self._sums[number] = safetensors_format.unpack(data)
            if len(self._sums[number]) != self._places.sums(number):
                raise Damaged(f"{where}: of another file")
        return self._sums[number]

    def _require_size(self, file: str, size: int, key: str = "") -> None:
        where = self._store.locate(self.name, file) + (f" ({key})" if key else "")
        with _explained(where):
            found = self._store.size(self.name, file)
        if found is None:
            raise Damaged(f"{where}: missing")
        if found != size:
            raise Damaged(f"{where}: has {found} bytes instead of {size}")

    def _locate(self, file: DataFile, key: str) -> str:
        where = self._store.locate(self.name, file.name)
        return f"{where} ({key})" if key else where


def _chunks(piece: Place, low: int, high: int, itemsize: int) -> Iterator[_Chunk]:
    """The blocks that hold the tensor's elements [low, high), all of which the piece has. One of
    which only a part is wanted is alone."""
    begin, end, size = ((element - piece.start) * itemsize for element in (low, high, piece.stop))
    whole = end if end == size else end - end % safetensors_format.BLOCK
    start = begin - begin % safetensors_format.BLOCK
    while start < end:
        in_parts = start < begin or start >= whole
        length = (
            safetensors_format.BLOCK if in_parts else min(safetensors_format.CHUNK, whole - start)
        )
        length = min(length, size - start)
        yield _Chunk(start, length, max(begin - start, 0), min(end - start, length))
        start += length


@contextlib.contextmanager
def _explained(where: str) -> Iterator[None]:
    """Errors of the system as ours: what is gone or unreadable is damage, the rest is not."""
    try:
        yield
    except FileNotFoundError as error:
        raise Damaged(f"{where}: missing") from error
    except OSError as error:
        text = f"{where}: cannot be read: {error.strerror or error}"
        raise (Damaged if error.errno == errno.EIO else CheckpointError)(text) from error


def contradiction(head: bytes, pieces: Iterable[tuple[TensorEntry, Piece]]) -> str:
    """What a file and its pieces in the manifest disagree about; empty if nothing.

    `head` is what precedes the file's data. Raises ValueError when it is none.
    """
    entries = table(head)
    named = set()
    for tensor, piece in pieces:
        name = _name(entries, tensor, piece)
        if name is None or not _lies_in(entries[name], len(head), tensor, piece, name):
            return f"{tensor.key} is not where the manifest says"
        named.add(name)
    unnamed = entries.keys() - named
    return f"{min(unnamed)} is not in the manifest" if unnamed else ""


def _name(entries: dict[str, Placed], tensor: TensorEntry, piece: Piece) -> str | None:
    """The name under which the layouts put a piece."""
    names = (_part(tensor, piece), tensor.key, tensor.key.removeprefix(f"{WEIGHT}/"))
    return next((name for name in names if name in entries), None)


def _lies_in(entry: Placed, data_start: int, tensor: TensorEntry, piece: Piece, name: str) -> bool:
    begin, end = data_start + entry.begin, data_start + entry.end
    size = (piece.stop - piece.start) * tensor.itemsize
    if name == _part(tensor, piece):
        return entry.dtype == tensor.dtype and piece.offset == begin and size == end - begin
    return (
        (entry.dtype, entry.shape) == (tensor.dtype, tensor.shape)
        and piece.offset == begin + piece.start * tensor.itemsize
        and piece.offset + size <= end
    )


def _part(tensor: TensorEntry, piece: Piece) -> str:
    return f"{tensor.key}@{piece.start}"
