"""Read any range of any tensor of a committed checkpoint, verified block by block."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator

from xxhash import xxh3_64_intdigest

from pipeline.checkpoint import block_sums
from pipeline.checkpoint.block_sums import BLOCK, SUM_BYTES
from pipeline.checkpoint.formats import StateSource
from pipeline.checkpoint.manifest import MANIFEST, Damaged, Manifest, sums_name
from pipeline.checkpoint.places import Place, Places
from pipeline.checkpoint.store import Store, step_number
from pipeline.checkpoint.tiles import Extent, Overlap, Strip, Tile, boxes, overlaps
from pipeline.errors import CheckpointError
from pipeline.utils.files import page_aligned

LONG = 1 << 20
"""Bytes between two runs that are not read along with them."""


class CheckpointReader(StateSource):
    """One committed checkpoint. Raises Damaged, naming file and tensor, for bytes that differ from
    those that were written; CheckpointError when it cannot be read for another reason, or is no
    checkpoint of this program."""

    def __init__(self, store: Store, name: str) -> None:
        self.name = name
        self._store = store
        self.where = store.locate(name)
        where = store.locate(name, MANIFEST)
        with _explained(where):
            # every checkpoint in a folder has the first rank's sums: it may have lost its manifest
            if store.size(name, MANIFEST) is None and store.size(name, sums_name(0)) is None:
                raise CheckpointError(f"{self.where}: no checkpoint: it holds no {MANIFEST}")
            data = store.get(name, MANIFEST)
        self.manifest = Manifest.load(data, where)
        self.step = self.manifest.step
        if step_number(name) not in (None, self.step):
            raise Damaged(f"{where}: of step {self.step}, in a folder that was renamed or copied")
        self.world_size = self.manifest.world_size
        self.writer = self.manifest.writer
        self.progress = self.manifest.progress
        self.state = self.manifest.state
        self.tensors = {entry.key: entry for entry in self.manifest.tensors}
        self.bytes_read = 0
        self._places = Places(self.manifest, where)
        self._good: set[int] = set()
        """Numbers of the files whose header was verified."""
        self._sums: dict[int, memoryview] = {}  # a 2048th of the parts that are read
        longest = max((entry.nbytes for entry in self.manifest.tensors), default=0)
        self._buffer = page_aligned(min(block_sums.CHUNK, longest))

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
        if start == stop:
            return
        width = self._places.width(key)
        if not width:
            yield from self._read_range(key, Tile(start, stop))
        elif width * size * 2 <= block_sums.CHUNK:
            yield from self._read_rows(key, start, stop, width)
        else:
            for low in (start, *range(start - start % width + width, stop, width)):
                high = min(low - low % width + width, stop)
                yield from self._read_range(key, Tile(low, high))

    def read_tile(self, key: str, wanted: Tile) -> Iterator[Strip]:
        """The elements of a tile, in any order. Pieces that are columns of the same rows are read
        without those beside them."""
        width = self._places.width(key)
        if width and wanted.stride not in (0, width):
            size = self.entry(key).itemsize
            for first, data in self.read(key, wanted.start, wanted.end):  # the whole rows around it
                here = Tile(first, first + len(data) // size)
                yield from (Strip(one, data) for one in overlaps(here, wanted, wanted.stride))
            return
        width = width or wanted.stride or max(self.entry(key).numel, 1)
        for place in self._places.find(key, wanted):
            for overlap in overlaps(place.tile, wanted, width):
                yield from self._strips(key, place, overlap)

    def read_bytes(self, key: str) -> bytes:
        """A whole small tensor."""
        return b"".join(bytes(data) for _, data in self.read(key, 0, self.entry(key).numel))

    def require_files(self) -> None:
        """Raise Damaged unless every file is there and has its size."""
        for file in self.manifest.files:
            self._require_size(file.name, file.size)
        for number, part in enumerate(self.manifest.parts):
            self._require_size(part.sums, self._places.sums(number) * SUM_BYTES)

    def require_headers(self) -> None:
        """Raise Damaged unless every file is there and has its header."""
        self.require_files()
        for number in range(len(self.manifest.files)):
            self._require_header(number)

    def verify(self, advance: Callable[[int], object] = lambda count: None) -> None:
        """Read everything; `advance` is called with numbers of bytes that were good."""
        self.require_headers()
        for key, entry in self.tensors.items():
            for place in self._places.find(key, Tile(0, entry.numel)):
                for _, data in self._read_piece(key, place, 0, place.tile.numel):
                    advance(len(data))

    def _read_range(self, key: str, wanted: Tile) -> Iterator[tuple[int, memoryview]]:
        """A range within a row, or of a tensor that is not divided by columns, in order."""
        width = self._places.width(key)
        shares: Iterable[tuple[Overlap, Place]] = (
            (overlap, place)
            for place in self._places.find(key, wanted)
            for overlap in overlaps(place.tile, wanted, width or self.entry(key).numel)
        )
        if width:  # tiles that begin in earlier rows may lie further right
            shares = sorted(shares, key=lambda share: share[0].there)
        for (_, run, here, _, there, _), place in shares:
            for at, data in self._read_piece(key, place, here, here + run):
                yield wanted.start + there + at - here, data

    def _read_rows(
        self, key: str, start: int, stop: int, width: int
    ) -> Iterator[tuple[int, memoryview]]:
        """A range of a tensor that is divided by columns, put together from its pieces: as many
        whole rows at a time as a chunk holds."""
        size = self.entry(key).itemsize
        step = block_sums.CHUNK // (width * size) * width
        memory = bytearray(min(step, stop - start + width) * size)
        for low in (start, *range(start - start % width + step, stop, step)):
            high = min(low - low % width + step, stop)
            for strip in self.read_tile(key, Tile(low, high)):
                strip.copy_into(memory, size)
            yield low, memoryview(memory)[: (high - low) * size]

    def _strips(self, key: str, place: Place, overlap: Overlap) -> Iterator[Strip]:
        """Yield the strips that a piece and a tile share. Long runs are read one by one, short
        ones together with what is between them."""
        rows, run, here, pitch, there, step = overlap
        size = self.entry(key).itemsize
        if rows > 1 and (pitch - run) * size >= LONG:
            for row in range(rows):
                one = Overlap(1, run, here + row * pitch, run, there + row * step, run)
                yield from self._strips(key, place, one)
            return
        if pitch == step == run or rows == 1:
            rows, run, pitch, step = 1, rows * run, rows * run, rows * run
        for at, data in self._read_piece(key, place, here, here + (rows - 1) * pitch + run):
            for box in boxes(at - here, at - here + len(data) // size, pitch):
                columns = min(box.right, run) - box.left
                if columns > 0:
                    target = there + box.top * step + box.left
                    found = Overlap(box.bottom - box.top, columns, box.at, pitch, target, step)
                    yield Strip(found, data)

    def _read_piece(
        self, key: str, piece: Place, low: int, high: int
    ) -> Iterator[tuple[int, memoryview]]:
        """Elements [low, high) of a piece, verified: (number of the first, bytes). They are read
        with the blocks around them; a block that is wanted in part is read on its own."""
        size = self.entry(key).itemsize
        begin, end, every = (element * size for element in (low, high, piece.tile.numel))
        whole = end if end == every else end - end % BLOCK
        start = begin - begin % BLOCK
        while start < end:
            is_partial = start < begin or start >= whole
            length = BLOCK if is_partial else min(block_sums.CHUNK, whole - start)
            data = self._buffer[: min(length, every - start)]
            self._read_blocks(key, piece, start, data)
            first = max(begin - start, 0)
            yield (start + first) // size, data[first : end - start]
            start += len(data)

    def _read_blocks(self, key: str, piece: Place, begin: int, into: memoryview) -> None:
        """Fill `into` with whole blocks of the piece, from its byte `begin` on."""
        try:
            self._require_header(piece.file, key)
            where = self._read_file(piece.file, piece.extent, begin, into, key)
            self.bytes_read += len(into)
            first = piece.first_sum + begin // BLOCK
            expected = self._sums_of(piece.part)[first:][: block_sums.count(len(into))]
            wrong = block_sums.first_wrong(into, expected)
            if wrong is not None:
                (offset, *_), *_ = piece.extent.segments(begin + wrong * BLOCK, 1)
                raise Damaged(f"{where}: damaged near byte {offset}")
        except Damaged as error:
            error.key = key
            raise

    def _read_file(
        self, number: int, extent: Extent, begin: int, into: memoryview, key: str
    ) -> str:
        """Fill `into` from byte `begin` of an extent of a data file on; returns the file's place
        and `key`."""
        file = self.manifest.files[number].name
        where = self._locate(file, key)
        segments = extent.segments(begin, len(into))
        with _explained(where):
            count = self._store.read(
                self.name, file, ((offset, into[low:high]) for offset, low, high in segments)
            )
        if count < len(into):
            raise Damaged(f"{where}: truncated")
        return where

    def _require_header(self, number: int, key: str = "") -> None:
        """Raise Damaged, once for each file, unless it has its size and its header."""
        if number in self._good:
            return
        file = self.manifest.files[number]
        self._require_size(file.name, file.size, key)
        head = memoryview(bytearray(file.data_start))
        where = self._read_file(number, Extent(0), 0, head, key)
        if xxh3_64_intdigest(head) != file.header:
            raise Damaged(f"{where}: its header is damaged")
        self._good.add(number)

    def _sums_of(self, number: int) -> memoryview:
        """Checksums of a part."""
        if number not in self._sums:
            part = self.manifest.parts[number]
            where = self._locate(part.sums)
            with _explained(where):
                data = self._store.get(self.name, part.sums)
            if xxh3_64_intdigest(data) != part.digest:
                raise Damaged(f"{where}: damaged")
            self._sums[number] = block_sums.unpack(data)
            if len(self._sums[number]) != self._places.sums(number):
                raise Damaged(f"{where}: of another file")
        return self._sums[number]

    def _require_size(self, file: str, size: int, key: str = "") -> None:
        where = self._locate(file, key)
        with _explained(where):
            found = self._store.size(self.name, file)
        if found is None:
            raise Damaged(f"{where}: missing")
        if found != size:
            raise Damaged(f"{where}: has {found} bytes instead of {size}")

    def _locate(self, file: str, key: str = "") -> str:
        return self._store.locate(self.name, file) + (f" ({key})" if key else "")


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
