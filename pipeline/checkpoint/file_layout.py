"""Layouts of the files that ranks write: a file a rank, or whole tensors in shared files. No rank
ever holds a whole tensor that it does not train whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from pipeline.checkpoint.division import KeyedTile
from pipeline.checkpoint.manifest import DataFile, TensorEntry
from pipeline.checkpoint.safetensors_format import Entry, header
from pipeline.checkpoint.tiles import Extent
from pipeline.checkpoint.writer_protocol import NewFile
from pipeline.contracts.engine import WEIGHT

ALIGN = 4096
"""Data of a file begins at a multiple of this."""


class Item(NamedTuple):
    """A piece, or the header (`head`) if there is no `span`: `size` bytes of file number `file`."""

    file: int
    extent: Extent
    size: int
    span: KeyedTile | None
    head: bytes = b""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Files of one rank, and what it writes into each."""

    files: Sequence[NewFile]
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
        """The order in which every rank writes its parts of them, each entry with the number of
        the file that it lies in whole, if ranks share files."""
        ordered = sorted(tensors, key=lambda tensor: (self._file(tensor.key), -tensor.itemsize))
        files = sorted({self._file(tensor.key) for tensor in ordered})
        return [
            tensor.model_copy(
                update={"file": files.index(self._file(tensor.key)) if self.shared else None}
            )
            for tensor in ordered
        ]

    def lay_out(
        self, rank: int, mine: Sequence[KeyedTile], tensors: Mapping[str, TensorEntry]
    ) -> Layout:
        """The files of `rank`, which writes `mine`; `tensors` are those of all ranks. Both are in
        order."""
        files, described, items = [], [], []
        # Names of the files, and all that will be in each, whoever writes it.
        contents = {} if self.shared else {f"rank-{rank:05d}.safetensors": [*mine]}
        for tensor in tensors.values() if self.shared else ():
            whole = KeyedTile(tensor.key, 0, tensor.numel)
            contents.setdefault(self._file(tensor.key), []).append(whole)
        for number, (name, spans) in enumerate(contents.items()):
            entries = [self._entry(span, tensors[span.key]) for span in spans]
            head = header(entries, metadata={"format": "pt"}, align=ALIGN)
            edges = list(itertools.accumulate((e.size for e in entries), initial=len(head)))
            size, begins = edges[-1], dict(zip(spans, edges, strict=False))
            files.append(NewFile(name=name, size=size, shared=self.shared))
            if rank == 0 or not self.shared:
                items.append(Item(number, Extent(0), len(head), None, head))
                digest = xxh3_64_intdigest(head)
                described.append(
                    DataFile(name=name, size=size, data_start=len(head), header=digest)
                )
            for span in mine:
                tensor = tensors[span.key]
                stored = KeyedTile(span.key, 0, tensor.numel) if self.shared else span
                if stored in begins:
                    tile, size = span.tile, tensor.itemsize
                    offset = begins[stored] + (span.start - stored.start) * size
                    extent = Extent.of(tile, offset, size, whole=self.shared)
                    items.append(Item(number, extent, tile.numel * size, span))
        return Layout(files=files, described=described, items=items)

    def _file(self, key: str) -> str:
        """Name of the file that holds the whole tensor, if ranks share files."""
        if not self.shared:
            return ""
        names = {WEIGHT: "model.safetensors", "random": "random.safetensors"}
        return names.get(key.partition("/")[0], "optimizer.safetensors")

    def _entry(self, span: KeyedTile, tensor: TensorEntry) -> Entry:
        tile, name = span.tile, f"{span.key}@{span.start}"
        shape: tuple[int, ...] = (tile.numel,)
        if tile.numel == tensor.numel:
            name, shape = span.key, tensor.shape
        elif tile.stride:
            name, shape = f"{name}x{tile.run}/{tile.stride}", (tile.count, tile.run)
        return Entry(
            name=span.key.removeprefix(f"{WEIGHT}/") if self.shared else name,
            dtype=tensor.dtype,
            shape=shape,
            size=tile.numel * tensor.itemsize,
        )


SHARDED = FileLayout("sharded", shared=False)
"""One file a rank. A whole tensor has its shape and its key for a name; a part of one is flat and
named `KEY@START`, columns of it are rows of their own and named `KEY@STARTxRUN/STRIDE`."""

FULL = FileLayout("full", shared=True)
"""Whole tensors, each once: `model.safetensors` with the names of the source model,
`optimizer.safetensors` and `random.safetensors` with keys."""
