"""One consolidated training state: a file of weights that other tools load, a file of the rest.

All ranks write their parts of the same files; no rank ever holds a whole tensor that it does not
train whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from pipeline.checkpoint.division import Span
from pipeline.checkpoint.layout import ALIGN, FileLayout, Layout
from pipeline.checkpoint.manifest import DataFile, TensorEntry
from pipeline.checkpoint.safetensors_format import Entry, header
from pipeline.checkpoint.writer_main import NewFile
from pipeline.contracts.engine import WEIGHT

WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
RANDOM = "random.safetensors"


class FullLayout(FileLayout):
    """FullLayout tensors, each once: `model.safetensors` with the names of the source model,
    `optimizer.safetensors` and `random.safetensors` with keys."""

    name = "full"

    def in_order(self, tensors: Iterable[TensorEntry]) -> list[TensorEntry]:
        ordered = sorted(tensors, key=lambda tensor: (_file(tensor.key), -tensor.itemsize))
        names = sorted({_file(tensor.key) for tensor in ordered})
        return [
            tensor.model_copy(update={"file": names.index(_file(tensor.key))}) for tensor in ordered
        ]

    def lay_out(
        self, rank: int, mine: Sequence[Span], tensors: Mapping[str, TensorEntry]
    ) -> Layout:
        files = list(_files(tensors.values()))
        place = {key: (number, at) for number, file in enumerate(files) for key, at in file.at}
        pieces = []
        for span in mine:
            number, begin = place[span.key]
            pieces.append((span, number, begin + span.start * tensors[span.key].itemsize))
        return Layout(
            files=[
                NewFile(name=f.described.name, size=f.described.size, shared=True) for f in files
            ],
            described=[file.described for file in files] if rank == 0 else [],
            heads={number: f.head for number, f in enumerate(files)} if rank == 0 else {},
            pieces=pieces,
        )


class _File(NamedTuple):
    """One of the files, as it will be."""

    described: DataFile
    head: bytes
    at: Sequence[tuple[str, int]]
    """Key of each tensor, and its first byte."""


def _files(tensors: Iterable[TensorEntry]) -> Iterator[_File]:
    """In order, as the tensors are."""
    content: dict[str, list[TensorEntry]] = defaultdict(list)
    for tensor in tensors:
        content[_file(tensor.key)].append(tensor)
    for name in content:
        head = _head(content[name])
        at, end = [], len(head)
        for tensor in content[name]:
            at.append((tensor.key, end))
            end += tensor.numel * tensor.itemsize
        digest = xxh3_64_intdigest(head)
        yield _File(DataFile(name=name, size=end, data_start=len(head), header=digest), head, at)


def _file(key: str) -> str:
    kind = key.partition("/")[0]
    return {WEIGHT: WEIGHTS, "random": RANDOM}.get(kind, OPTIMIZER)


def _head(tensors: Sequence[TensorEntry]) -> bytes:
    entries = [
        Entry(
            name=tensor.key.removeprefix(f"{WEIGHT}/"),
            dtype=tensor.dtype,
            shape=tensor.shape,
            size=tensor.numel * tensor.itemsize,
        )
        for tensor in tensors
    ]
    return header(entries, metadata={"format": "pt"}, align=ALIGN)
