"""Where pieces of tensors lie: in the files that ranks write, which are safetensors files with
checksums of blocks, and before that in the snapshot buffer, on their way to the writer. Imports no
torch.

Files are one a rank, or whole tensors in shared files; no rank ever holds a whole tensor that it
does not train whole. Some pieces are copied to the buffer whole before training continues. The
others are streamed in rounds through the two halves of a memory of a given size: one is filled
while the writer takes the other. Round r uses half r % 2, so the writer must have acknowledged
round r - 2 before; it never acknowledges the last two, R - 2 and R - 1, which are still unwritten
when training continues. Rounds 0 and 1 are announced only when round 2 needs room: until then the
writer does not compete with the copies."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from xxhash import xxh3_64_intdigest

from pipeline.checkpoint.division import Tile
from pipeline.checkpoint.manifest import BLOCK, DataFile, TensorEntry
from pipeline.contracts.engine import WEIGHT
from pipeline.utils.files import PAGE

CHUNK: Final = 256 * BLOCK
"""Bytes that are read, written or verified at a time."""
ALIGN = 4096
"""Data of a file begins at a multiple of this."""
PASSAGE = 1 << 30
"""Upper bound, in bytes, of the memory of a rank for streamed pieces, plus two pages for
alignment."""
HALVES = 2
"""Parts of that memory, each for one round at a time."""


class Entry(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    """Bytes."""


class Placed(NamedTuple):
    """A tensor of a file: bytes [begin, end) after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def table(head: bytes) -> dict[str, Placed]:
    """The tensors of a file by name, given what `header` returned. Raises ValueError."""
    try:
        entries = json.loads(head[8:])
        entries.pop("__metadata__", None)
        return {
            name: Placed(entry["dtype"], tuple(entry["shape"]), *map(int, entry["data_offsets"]))
            for name, entry in entries.items()
        }
    except (TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError("no safetensors header") from error


def header(
    entries: Iterable[Entry], *, metadata: Mapping[str, str] | None = None, align: int = 8
) -> bytes:
    """Bytes that precede the tensors, which follow without gaps in the given order: the length of
    the JSON as 8 bytes little-endian, and the JSON padded with spaces so that data begins at a
    multiple of `align` (https://github.com/huggingface/safetensors)."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, dtype, shape, size in entries:
        offsets = [start, start + size]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        start += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % align)
    return struct.pack("<Q", len(text)) + text


def block_sums(data: memoryview) -> list[int]:
    """The checksum (XXH3, 64 bits) of each block of `data`, which starts at a block's start."""
    return [xxh3_64_intdigest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]


class Item(NamedTuple):
    """A tile of tensor `key` that a rank writes into file number `file`, at the bytes `place`; the
    header (`head`) if the key is empty."""

    file: int
    place: Tile
    key: str = ""
    tile: Tile = Tile(0, 0)
    head: bytes = b""


@dataclass(frozen=True, kw_only=True)
class RankFiles:
    """The files of one rank, and all that it writes into them."""

    files: Sequence[tuple[str, int]]
    """Names and sizes."""
    shared: bool
    described: Sequence[DataFile]
    """Files whose header this rank writes, the same at every save."""
    items: Sequence[Item]
    """File by file, each from its start to its end."""


@dataclass(frozen=True)
class FileLayout:
    """A way to put tensors into safetensors files: `SHARDED` or `FULL`."""

    name: str
    shared: bool
    """Whether ranks write parts of the same files, whose headers rank 0 writes."""

    def in_order(self, tensors: Iterable[TensorEntry]) -> list[TensorEntry]:
        """The order in which ranks write; if they share files, with the number of each file."""
        # Larger elements first: every piece begins at a multiple of its itemsize, as safetensors
        # leaves no gaps.
        names = [(_file_of(t.key) if self.shared else "", -t.itemsize, t) for t in tensors]
        files = sorted({name for name, *_ in names})
        ordered = [
            (tensor, files.index(name) if self.shared else None)
            for name, _, tensor in sorted(names, key=lambda one: one[:2])
        ]
        return [t if t.file == n else t.model_copy(update={"file": n}) for t, n in ordered]

    def lay_out(
        self, rank: int, own: Sequence[tuple[int, Tile]], tensors: Sequence[TensorEntry]
    ) -> RankFiles:
        """The files of `rank`, which writes the tiles `own`, each with the number of its tensor.
        `tensors` are all ranks'; both are in order."""
        files, described, items = [], [], []
        # Names of the files, and all that will be in each, whoever writes it.
        contents = {} if self.shared else {f"rank-{rank:05d}.safetensors": list(own)}
        for number, tensor in enumerate(tensors) if self.shared else ():
            contents.setdefault(_file_of(tensor.key), []).append((number, Tile(0, tensor.numel)))
        for file, (name, stored) in enumerate(contents.items()):
            entries = []
            for number, tile in stored:
                tensor = tensors[number]
                label, shape = tensor.key, tensor.shape
                if tile.numel != tensor.numel:
                    label, shape = f"{label}@{tile.start}", (tile.numel,)
                    if tile.stride:
                        label, shape = f"{label}x{tile.run}/{tile.stride}", (tile.count, tile.run)
                label = label.removeprefix(f"{WEIGHT}/") if self.shared else label
                size = tile.numel * tensor.itemsize
                entries.append(Entry(label, tensor.dtype, shape, size))
            head = header(entries, metadata={"format": "pt"}, align=ALIGN)
            edges = list(itertools.accumulate((e.size for e in entries), initial=len(head)))
            files.append((name, edges[-1]))
            if rank == 0 or not self.shared:
                items.append(Item(file, Tile(0, len(head)), head=head))
                digest = xxh3_64_intdigest(head)
                described.append(
                    DataFile(name=name, size=edges[-1], data_start=len(head), header=digest)
                )
            begins = dict(zip(stored, edges, strict=False))
            for number, tile in own:
                tensor = tensors[number]
                begin = begins.get((number, Tile(0, tensor.numel) if self.shared else tile))
                if begin is not None:
                    place = Tile(begin, begin + tile.numel * tensor.itemsize)
                    if self.shared:
                        place = tile_in_file(tile, begin, tensor.itemsize)
                    items.append(Item(file, place, tensor.key, tile))
        return RankFiles(files=files, shared=self.shared, described=described, items=items)


SHARDED = FileLayout("sharded", shared=False)
"""One file a rank. A whole tensor has its shape and its key for a name; a part of one is flat and
named `KEY@START`, columns of it are separate rows and named `KEY@STARTxRUN/STRIDE`."""

FULL = FileLayout("full", shared=True)
"""Whole tensors, each once: `model.safetensors` with the names of the source model,
`optimizer.safetensors` and `random.safetensors` with keys."""


def _file_of(key: str) -> str:
    """Name of the file that holds the whole tensor, where ranks share files."""
    names = {WEIGHT: "model.safetensors", "random": "random.safetensors"}
    return names.get(key.partition("/")[0], "optimizer.safetensors")


def tile_in_file(tile: Tile, begin: int, itemsize: int) -> Tile:
    """The bytes of a tile in a file that has the whole tensor from byte `begin` on."""
    start, stop = begin + tile.start * itemsize, begin + tile.stop * itemsize
    return Tile(start, stop, tile.stride * itemsize, tile.count)


class Write(NamedTuple):
    """`size` bytes of the snapshot buffer, which go into file number `file`. They are elements of
    tensor `key` that follow each other in this rank's part of it; of no tensor, without block
    checksums, if the key is empty."""

    file: int
    place: Tile
    """Bytes of the file that the whole item takes."""
    place_offset: int
    """Number of the first byte within `place`."""
    buffer_offset: int
    """First byte in the snapshot buffer."""
    size: int
    key: str
    first_element: int
    """Number of the first element within the tensor."""


@dataclass(frozen=True, kw_only=True)
class Staging:
    """The place of each piece in the snapshot buffer, and its round."""

    size: int
    """Bytes of the snapshot buffer."""
    heads: Sequence[tuple[int, bytes]]
    """Offsets in the buffer, and bytes there that are the same at every save."""
    rounds: Sequence[Sequence[Write]]
    """Writes of each round: file by file, each from its start to its end."""
    streamed: Set[str]
    """Keys of the tensors that are copied round by round; the others before anything is
    written."""


def plan_staging(own: RankFiles, streamed: Set[str], passage: int = PASSAGE) -> Staging:
    """The staging of what a rank writes. Tensors whose keys are `streamed` take at most `passage`
    bytes.

    Everything lies as far after the start of a page as in its file: O_DIRECT needs that, and
    elements lie as their dtype demands."""
    heads, rounds, end = [], list[list[Write]]([[]]), 0
    buffer_offsets = dict[Item, int]()
    for item in own.items:
        if item.key not in streamed:
            offset = buffer_offsets[item] = end + (item.place.start - end) % PAGE
            end = offset + item.place.numel
            heads += [] if item.key else [(offset, item.head)]
    # Double buffer from `base` on. Each half has a spare page for alignment.
    base = end = end + -end % PAGE
    half, used = passage // HALVES // BLOCK * BLOCK + PAGE, 0
    for item in own.items:
        size, done = item.place.numel, 0
        if item in buffer_offsets:
            offset = buffer_offsets[item]
            rounds[-1].append(
                Write(item.file, item.place, 0, offset, size, item.key, item.tile.start)
            )
            continue
        itemsize = size // item.tile.numel
        while done < size:
            start = base + half * ((len(rounds) - 1) % HALVES)
            offset = start + used
            offset += (item.place.start + done - offset) % PAGE
            cut = min(size - done, start + half - offset)
            if done + cut < size:
                cut -= cut % BLOCK  # whole blocks: sums of the cuts in a row are the piece's sums
            if cut <= 0:
                rounds.append([])
                used = 0
                continue
            first = item.tile.element(done // itemsize)
            rounds[-1].append(Write(item.file, item.place, done, offset, cut, item.key, first))
            used, end, done = offset + cut - start, max(end, offset + cut), done + cut
    return Staging(size=end, heads=heads, rounds=rounds, streamed=streamed)
