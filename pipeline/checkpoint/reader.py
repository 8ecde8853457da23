"""Read any range of any tensor of a committed checkpoint, verified block by block."""

from __future__ import annotations

import contextlib
import errno
import itertools
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from pipeline.checkpoint import file_layout
from pipeline.checkpoint.division import Piece, Tile
from pipeline.checkpoint.file_layout import block_sums, tile_in_file
from pipeline.checkpoint.formats import Formats, Reading, StateSource
from pipeline.checkpoint.location import Store, open_checkpoint
from pipeline.checkpoint.manifest import BLOCK, MANIFEST, MAX_ELEMENTS, SUMS, Damaged, Manifest
from pipeline.checkpoint.store import step_number
from pipeline.errors import CheckpointError
from pipeline.utils.files import page_aligned

SUM_BYTES = 8
"""Bytes of a block's checksum."""
LONG = 1 << 20
"""Bytes between two runs that are not read along with them."""


class PlacedTile(NamedTuple):
    """A tile that a rank wrote: the bytes `place` of file number `file`."""

    tile: Tile
    file: int
    place: Tile
    rank: int
    first_sum: int
    """Number of its first block's checksum among the rank's."""


class Strip(NamedTuple):
    """`rows` x `run` elements of a tile: in `data` from element `source` on, rows `source_pitch`
    apart, and in the tile from `target` on, `target_pitch` apart. `data` is valid until the next
    strip is taken."""

    rows: int
    run: int
    source: int
    source_pitch: int
    target: int
    target_pitch: int
    data: memoryview


class RankTable(NamedTuple):
    """Number of a rank's checksums; columns of its pieces in the order of their keys, which are the
    tensor's number x MAX_ELEMENTS + the first element's: file, offset, number of the first
    checksum."""

    sums: int
    keys: Sequence[int]
    files: Sequence[int]
    offsets: Sequence[int]
    first_sums: Sequence[int]


Pattern = tuple[list[Piece], list[int], list[int], int]
"""Pieces of a tensor in the order of their first elements, and where each begins; the last end up
to each; elements of the rows by whose columns the tensor is divided, 0 if it is not."""


class Places:
    """Places of a manifest's pieces, computed where they are asked about. Raises Damaged, naming
    `where`, for tensors that do not fill their files."""

    def __init__(self, manifest: Manifest, where: str) -> None:
        self._manifest = manifest
        self._where = where
        self._division = manifest.divided
        self._numbers = {entry.key: number for number, entry in enumerate(manifest.tensors)}
        self._patterns: dict[int, Pattern] = {}
        self._tables: dict[int, RankTable] = {}
        self._shared_offsets: dict[int, int] = {}
        """First byte of the tensors that are whole in a file, one after the other, by number."""
        ends: dict[int, int] = {}
        for number, entry in enumerate(manifest.tensors):
            if entry.file is not None:
                start = ends.get(entry.file) or manifest.files[entry.file].data_start
                ends[entry.file] = start + entry.numel * entry.itemsize
                self._shared_offsets[number] = start
        for number, end in ends.items():
            if end != manifest.files[number].size:
                name = manifest.files[number].name
                raise Damaged(f"{where}: {name}: its tensors do not fill it")

    def find(self, key: str, wanted: Tile) -> tuple[int, list[PlacedTile]]:
        """Elements of the rows by whose columns a tensor is divided, 0 if it is not; and the pieces
        that have elements of a tile, in the order of their first ones. There are none for columns
        of other rows."""
        number = self._numbers[key]
        entry, pattern = self._manifest.tensors[number], self._division.tensors[number]
        if pattern not in self._patterns:
            pieces = sorted(self._division.patterns[pattern], key=lambda piece: piece.start)
            ends = itertools.accumulate((Tile(*piece[1:]).end for piece in pieces), max)
            width = max((piece.stride for piece in pieces), default=0)
            self._patterns[pattern] = pieces, [piece.start for piece in pieces], [*ends], width
        pieces, starts, last_ends, width = self._patterns[pattern]
        found: list[PlacedTile] = []
        if not wanted.numel or (width and wanted.stride not in (0, width)):
            return width, found
        row = width or wanted.stride
        low, high = bisect_right(last_ends, wanted.start), bisect_left(starts, wanted.end)
        for rank, *edges in pieces[low:high]:
            tile = Tile(*edges)
            if row and not any(tile.common(wanted, row)):
                continue
            table = self.table(rank)
            at = bisect_left(table.keys, number * MAX_ELEMENTS + tile.start)
            offset = table.offsets[at]
            place = Tile(offset, offset + tile.numel * entry.itemsize)
            if number in self._shared_offsets:
                place = tile_in_file(tile, self._shared_offsets[number], entry.itemsize)
            found.append(PlacedTile(tile, table.files[at], place, rank, table.first_sums[at]))
        return width, found

    def table(self, rank: int) -> RankTable:
        """The places of a rank's pieces."""
        if rank in self._tables:
            return self._tables[rank]
        tensors, end = self._manifest.tensors, 0
        # tensor, file, first byte there, first element, and as if it was a range the last one
        placed: list[tuple[int, int, int, int, int]] = [*self._manifest.parts[rank].pieces]
        for number, tile in self._division.of_rank(rank) if self._manifest.version > 1 else ():
            file, offset = tensors[number].file, self._shared_offsets.get(number, 0)
            if file is None:
                file, offset = rank, end or self._manifest.files[rank].data_start
                end = offset + tile.numel * tensors[number].itemsize
            placed.append((number, file, offset, tile.start, tile.start + tile.numel))
        if end and end != self._manifest.files[rank].size:
            name = self._manifest.files[rank].name
            raise Damaged(f"{self._where}: {name}: its tensors do not fill it")
        rows, sums = [], 0
        for number, file, offset, start, stop in placed:  # in the order of the checksums
            rows.append((number * MAX_ELEMENTS + start, file, offset, sums))
            sums += -(-(stop - start) * tensors[number].itemsize // BLOCK)
        rows.sort()
        columns = (array("Q", [row[field] for row in rows]) for field in range(4))
        self._tables[rank] = RankTable(sums, *columns)
        return self._tables[rank]


class CheckpointReader(StateSource):
    """One committed checkpoint. Raises Damaged, naming file and tensor, for bytes that differ from
    what was written; CheckpointError when it cannot be read for another reason, or is not a
    checkpoint of this program."""

    def __init__(self, store: Store, name: str) -> None:
        self.name = name
        self._store = store
        self.where = store.locate(name)
        where = store.locate(name, MANIFEST)
        with _explained(where):
            # every checkpoint in a folder has the first rank's sums: it may have lost its manifest
            if store.size(name, MANIFEST) is None and store.size(name, SUMS.format(0)) is None:
                raise CheckpointError(f"{self.where}: no checkpoint: it holds no {MANIFEST}")
            data = store.get(name, MANIFEST)
        self.manifest = manifest = Manifest.load(data, where)
        self.step, self.world_size = manifest.step, manifest.world_size
        if step_number(name) not in (None, self.step):
            raise Damaged(f"{where}: of step {self.step}, in a folder that was renamed or copied")
        self.writer, self.progress, self.state = manifest.writer, manifest.progress, manifest.state
        self.tensors = {entry.key: entry for entry in manifest.tensors}
        self.bytes_read = 0
        self.places = Places(manifest, where)
        self._good: set[int] = set()
        """Numbers of the files whose header was verified."""
        self._sums: dict[int, memoryview] = {}  # a 2048th of the ranks' parts that are read
        longest = max((entry.numel * entry.itemsize for entry in manifest.tensors), default=0)
        self._buffer = page_aligned(min(file_layout.CHUNK, longest))

    def digest(self) -> str:
        return self.manifest.digest()

    def close(self) -> None:
        """Keep nothing open: each read opens its file."""

    def read(self, key: str, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        numel, size = self.entry(key).numel, self.entry(key).itemsize
        if not 0 <= start <= stop <= numel:
            raise CheckpointError(
                f"{self.where}: {key} has {numel} elements, {start} to {stop} were asked for"
            )
        wanted = Tile(start, stop)
        width, _ = self.places.find(key, wanted)
        if not width:
            yield from ((start + strip.target, strip.data) for strip in self.read_tile(key, wanted))
            return
        # Columns: put together from the pieces, whole rows where a chunk holds some.
        step = max(file_layout.CHUNK // size, 1)
        memory = bytearray(min(step, stop - start) * size)
        while start < stop:
            high = min(start + step, stop)
            edge = high - high % width
            high = edge if start < edge and high < stop else high
            for rows, run, source, pitch, target, step_there, data in self.read_tile(
                key, Tile(start, high)
            ):
                shape = rows, run * size
                stored = np.ndarray(shape, np.uint8, data, source * size, (pitch * size, 1))
                there = np.ndarray(shape, np.uint8, memory, target * size, (step_there * size, 1))
                there[:] = stored
            yield start, memoryview(memory)[: (high - start) * size]
            start = high

    def read_tile(self, key: str, wanted: Tile) -> Iterator[Strip]:
        """The elements of a tile of a known tensor, in any order (of ranges in theirs); of columns
        none of those next to them."""
        size = self.tensors[key].itemsize
        width, places = self.places.find(key, wanted)
        if not (width or wanted.stride):
            for place in places:
                first = place.tile.start
                low, high = max(wanted.start, first), min(wanted.stop, place.tile.stop)
                for at, data in self._read_piece(key, place, low - first, high - first):
                    run = len(data) // size
                    yield Strip(1, run, 0, run, first + at - wanted.start, run, data)
            return
        if width and wanted.stride not in (0, width):  # from the whole rows around it
            for first, data in self.read(key, wanted.start, wanted.end):
                here = Tile(first, first + len(data) // size)
                for part in here.common(wanted, wanted.stride):
                    there = wanted.position(part.start)
                    assert there is not None
                    pitch, step, here_at = wanted.stride, wanted.run, part.start - first
                    yield Strip(part.count, part.run, here_at, pitch, there, step, data)
            return
        width = width or wanted.stride
        found = ((place, part) for place in places for part in place.tile.common(wanted, width))
        for place, common in found:
            # Long runs are read one by one, short ones together with what is between them.
            pitch, step = (tile.run if tile.stride else width for tile in (place.tile, wanted))
            apart = common.count > 1 and (pitch - common.run) * size >= LONG
            rows = 1 if apart else common.count
            # Numbered from `source` on, the elements are columns of rows of `pitch`.
            columns = Tile(0, common.run, pitch, rows)
            if rows == 1 or pitch == step == common.run:
                pitch = step = rows * common.run
                columns = Tile(0, pitch, pitch)
            for start in range(common.start, common.end, width) if apart else (common.start,):
                source, target = place.tile.position(start), wanted.position(start)
                assert source is not None
                assert target is not None
                for at, data in self._read_piece(key, place, source, source + columns.end):
                    here = Tile(at - source, at - source + len(data) // size)
                    for part in here.common(columns, pitch):
                        row, column = divmod(part.start, pitch)
                        there = target + row * step + column
                        first = part.start - here.start
                        yield Strip(part.count, part.run, first, pitch, there, step, data)

    def read_bytes(self, key: str) -> bytes:
        """A whole small tensor."""
        return b"".join(bytes(data) for _, data in self.read(key, 0, self.entry(key).numel))

    def require_files(self) -> None:
        """Raise Damaged unless every file is there and has its size."""
        sizes = [(file.name, file.size) for file in self.manifest.files]
        for rank, part in enumerate(self.manifest.parts):
            sizes.append((part.sums, self.places.table(rank).sums * SUM_BYTES))
        for file, size in sizes:
            where = self._store.locate(self.name, file)
            with _explained(where):
                found = self._store.size(self.name, file)
            if found is None:
                raise Damaged(f"{where}: missing")
            if found != size:
                raise Damaged(f"{where}: has {found} bytes instead of {size}")

    def require_headers(self) -> None:
        """Raise Damaged unless every file is there and has its header."""
        self.require_files()
        for number in range(len(self.manifest.files)):
            self._read_file(number, Tile(0, 1), 0, memoryview(b""), "")

    def verify(self, advance: Callable[[int], object] = lambda count: None) -> None:
        """Read everything; `advance` is called with numbers of bytes that were good."""
        self.require_headers()
        for key, entry in self.tensors.items():
            for place in self.places.find(key, Tile(0, entry.numel))[1]:
                for _, data in self._read_piece(key, place, 0, place.tile.numel):
                    advance(len(data))

    def _read_piece(
        self, key: str, piece: PlacedTile, low: int, high: int
    ) -> Iterator[tuple[int, memoryview]]:
        """Elements [low, high) of a piece, verified: (number of the first, bytes). They are read
        with the blocks around them; a block that is wanted in part is read on its own."""
        size = self.tensors[key].itemsize
        begin, end, every = (element * size for element in (low, high, piece.tile.numel))
        whole = end if end == every else end - end % BLOCK
        start = begin - begin % BLOCK
        while start < end:
            is_partial = start < begin or start >= whole
            length = BLOCK if is_partial else min(file_layout.CHUNK, whole - start)
            data = self._buffer[: min(length, every - start)]
            try:
                where = self._read_file(piece.file, piece.place, start, data, key)
                self.bytes_read += len(data)
                if piece.rank not in self._sums:
                    part = self.manifest.parts[piece.rank]
                    sums_where = self._store.locate(self.name, part.sums)
                    with _explained(sums_where):
                        sums = self._store.get(self.name, part.sums)
                    if xxh3_64_intdigest(sums) != part.digest:
                        raise Damaged(f"{sums_where}: damaged")
                    if len(sums) != self.places.table(piece.rank).sums * SUM_BYTES:
                        raise Damaged(f"{sums_where}: of another file")
                    # a view, as there can be millions
                    self._sums[piece.rank] = memoryview(sums).cast("Q")
                first = piece.first_sum + start // BLOCK
                expected = self._sums[piece.rank][first:][: -(-len(data) // BLOCK)]
                for at, (found, wanted) in enumerate(zip(block_sums(data), expected, strict=True)):
                    if found != wanted:
                        (offset, *_), *_ = piece.place.segments(start + at * BLOCK, 1)
                        raise Damaged(f"{where}: damaged near byte {offset}")
            except Damaged as error:
                error.key = key
                raise
            first = max(begin - start, 0)
            yield (start + first) // size, data[first : end - start]
            start += len(data)

    def _read_file(self, number: int, place: Tile, begin: int, into: memoryview, key: str) -> str:
        """Fill `into` from byte `begin` of a place on, after the header of the file was verified;
        returns the file's address and `key`."""
        file = self.manifest.files[number]
        where = self._store.locate(self.name, file.name) + (f" ({key})" if key else "")
        if number not in self._good:
            with _explained(where):
                found = self._store.size(self.name, file.name)
                if found != file.size:
                    what = f"has {found} bytes instead of {file.size}"
                    raise Damaged(f"{where}: {'missing' if found is None else what}")
                head = memoryview(bytearray(file.data_start))
                self._store.read(self.name, file.name, [(0, head)])
            if xxh3_64_intdigest(head) != file.header:
                raise Damaged(f"{where}: its header is damaged")
            self._good.add(number)
        segments = place.segments(begin, len(into))
        with _explained(where):
            count = self._store.read(
                self.name, file.name, ((offset, into[low:high]) for offset, low, high in segments)
            )
        if count < len(into):
            raise Damaged(f"{where}: truncated")
        return where


def open_state(address: str, reading: Reading) -> StateSource:
    """The state at a path, in any format, or at an address. Raises CheckpointError, UsageError."""
    if "://" in address:
        return CheckpointReader(*open_checkpoint(address))
    folder = Path(address)
    return Formats.installed().detect(folder).open(folder, reading)


@contextlib.contextmanager
def _explained(where: str) -> Iterator[None]:
    """Raise errors of the system as ours: Damaged for a file that is gone or unreadable."""
    try:
        yield
    except FileNotFoundError as error:
        raise Damaged(f"{where}: missing") from error
    except OSError as error:
        text = f"{where}: cannot be read: {error.strerror or error}"
        raise (Damaged if error.errno == errno.EIO else CheckpointError)(text) from error
