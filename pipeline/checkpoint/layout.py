"""Who writes which part of every tensor to which place; settled once a run, before the first save.

Every rank tells rank 0 what it holds. Rank 0 divides the work and says by rule who writes what, and
each lays out its own files. So only rank 0 has work that grows with the number of ranks.
"""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from pipeline.checkpoint import rng_state
from pipeline.checkpoint.division import MOST_TENSORS, CoverageError, Division, Pieces, Run, Span
from pipeline.checkpoint.manifest import DataFile, TensorEntry
from pipeline.checkpoint.safetensors_format import ITEM_BYTES, Entry, header
from pipeline.checkpoint.sharing import share_writing
from pipeline.checkpoint.writer_main import NewFile
from pipeline.errors import StageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pipeline.contracts.engine import Engine
    from pipeline.distributed.process_group import DistContext


CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}


def code(dtype: torch.dtype) -> str:
    """The format's name of a dtype."""
    return CODES[dtype]


def dtype(code: str) -> torch.dtype:
    """The dtype that the format calls `code`."""
    return DTYPES[code]


def as_bytes(flat: torch.Tensor) -> memoryview:
    """The memory of a contiguous flat tensor on the CPU."""
    return memoryview(flat.detach().view(torch.uint8).numpy().data)


ALIGN = 4096
"""Data of a file begins at a multiple of this."""


class LocalShard(NamedTuple):
    """Elements [start, stop) of a tensor that a rank holds."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    on_host: bool
    """Whether they lie in this machine's memory, not on an accelerator."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Files of one rank, and what it writes into each."""

    files: Sequence[NewFile]
    described: Sequence[DataFile]
    """Of these files, those whose head this rank writes."""
    heads: Mapping[int, bytes]
    """Number of a file -> what this rank writes at its begin, the same at every save."""
    pieces: Sequence[tuple[Span, int, int]]
    """What, in which file, at which byte: file by file, each from its start to its end."""


class FileLayout(ABC):
    """How the pieces that a rank writes are put into files."""

    name: str

    @abstractmethod
    def in_order(self, tensors: Iterable[TensorEntry]) -> list[TensorEntry]:
        """The order in which every rank writes its parts of them, each entry with the number of
        the file that it lies in whole, if ranks share files."""

    @abstractmethod
    def lay_out(
        self, rank: int, mine: Sequence[Span], tensors: Mapping[str, TensorEntry]
    ) -> Layout:
        """The files of `rank`, which writes `mine`; `tensors` are those of all ranks. Both are in
        order."""


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """A rank's layout, and what the manifest of every checkpoint says of all ranks'."""

    layout: Layout
    tensors: Sequence[TensorEntry]
    runs: Sequence[Sequence[Run]]
    files: Sequence[DataFile]
    """On rank 0."""
    held: Set[str]
    """Keys of what this rank's engine has."""
    on_host: Set[str]
    """Bytes of these that lie in this machine's memory."""


def plan_writes(
    engine: Engine, dist: DistContext, arrangement: FileLayout, without: Set[str] = frozenset()
) -> WritePlan:
    """Agree with all ranks (collective); parameters `without` are not written. Raises StageError
    when what ranks hold does not make up the tensors."""
    own = held(engine, without)
    messages = dist.collect(message(own, _random(dist)))
    tensors, runs = unpacked(
        dist.broadcast_str(divided(messages, arrangement) if dist.is_main else None)
    )
    layout = arrangement.lay_out(
        dist.rank, spans_of(dist.rank, tensors, runs), {entry.key: entry for entry in tensors}
    )
    told = dist.collect(json.dumps([file.model_dump() for file in layout.described]).encode())
    return WritePlan(
        layout=layout,
        tensors=tensors,
        runs=runs,
        files=[DataFile(**file) for described in told for file in json.loads(described)],
        held={holding.key for holding in own},
        on_host={holding.key for holding in own if holding.on_host},
    )


def held(engine: Engine, without: Set[str] = frozenset()) -> list[LocalShard]:
    """What this rank's fragments are, but for those of parameters `without`."""
    return [
        LocalShard(
            f"{kind}/{part.name}", code(tensor.dtype), tuple(part.shape), part.start, part.stop,
            tensor.device.type == "cpu",
        )
        for part in engine.fragments()
        for kind, tensor in part.state.items()
        if tensor.numel() and part.name not in without
    ]  # fmt: skip


def random_key(rank: int, name: str) -> str:
    """Key of the state of a rank's generator."""
    return f"random/{rank:05d}/{name}"


def _random(dist: DistContext) -> dict[str, int]:
    return {name: len(state) for name, state in rng_state.capture(dist.device).items()}


def message(own: Sequence[LocalShard], random: Mapping[str, int]) -> bytes:
    """Message of a rank to rank 0: which tensors, which ranges of them, bytes of random states. The
    first is equal on most ranks, so that rank 0 reads it once."""
    table = zlib.compress(json.dumps([[h.key, h.dtype, h.shape] for h in own]).encode())
    ranges = np.array([(h.start, h.stop) for h in own], dtype="<i8").tobytes()
    return json.dumps({"random": random, "table": len(table)}).encode() + b"\n" + table + ranges


def divided(messages: Sequence[bytes], arrangement: FileLayout) -> str:
    """All tensors in order and who writes them, from what every rank has told; for `unpacked`.
    Raises StageError for more tensors than keys have room for."""
    known: dict[bytes, NDArray[np.int64]] = {}
    numbers: dict[str, int] = {}
    entries: list[TensorEntry] = []
    held, random = [], []
    for rank, told in enumerate(messages):
        begin = told.index(b"\n") + 1
        facts = json.loads(told[:begin])
        end = begin + facts["table"]
        table = told[begin:end]
        if table not in known:
            own = list(_numbered(json.loads(zlib.decompress(table)), numbers, entries))
            known[table] = np.array(own, dtype=np.int64)
        columns = np.frombuffer(told, "<i8", offset=end).reshape(-1, 2).T
        held.append(Pieces(known[table], *columns))
        random += [(rank, random_key(rank, name), size) for name, size in facts["random"].items()]
    tensors = arrangement.in_order(
        [*entries, *(TensorEntry(key=key, dtype="U8", shape=(size,)) for _, key, size in random)]
    )
    if len(tensors) > MOST_TENSORS:
        raise StageError(f"a checkpoint has room for {MOST_TENSORS} tensors, not {len(tensors)}")
    runs = {key: [Run(0, size, size, rank)] for rank, key, size in random}
    runs.update(zip(numbers, _shared(entries, held), strict=True))
    made = [[*entry.model_dump().values(), runs[entry.key]] for entry in tensors]
    return base64.b64encode(zlib.compress(json.dumps(made).encode())).decode()


def unpacked(text: str) -> tuple[list[TensorEntry], list[list[Run]]]:
    """Division that rank 0 has made."""
    tensors, runs = [], []
    for key, dtype, shape, file, own in json.loads(zlib.decompress(base64.b64decode(text))):
        tensors.append(TensorEntry(key=key, dtype=dtype, shape=tuple(shape), file=file))
        runs.append([Run(*run) for run in own])
    return tensors, runs


def spans_of(
    rank: int, tensors: Sequence[TensorEntry], runs: Sequence[Sequence[Run]]
) -> list[Span]:
    """Spans that a rank writes, in order."""
    columns = (column.tolist() for column in Division(runs).of(rank))
    return [
        Span(tensors[number].key, start, stop) for number, start, stop in zip(*columns, strict=True)
    ]


def _numbered(
    table: Iterable[Any], numbers: dict[str, int], entries: list[TensorEntry]
) -> Iterable[int]:
    """The numbers of a rank's tensors; those that are new are entered."""
    for key, dtype, shape in table:
        entry = TensorEntry(key=key, dtype=dtype, shape=tuple(shape))
        number = numbers.setdefault(key, len(entries))
        if number == len(entries):
            entries.append(entry)
        if entries[number] != entry:
            raise StageError(f"{key}: ranks differ in its shape or dtype")
        yield number


def _shared(entries: Sequence[TensorEntry], held: Sequence[Pieces]) -> list[list[Run]]:
    try:
        return share_writing(held, [entry.numel for entry in entries])
    except CoverageError as misfit:
        key = entries[misfit.tensor].key
        raise StageError(f"the ranks' parts of {key} do not make it up: {misfit}") from None


class ShardedLayout(FileLayout):
    """One safetensors file a rank. A whole tensor has its shape and its key for a name; a part of
    one is flat and named `KEY@START`."""

    name = "sharded"

    def in_order(self, tensors: Iterable[TensorEntry]) -> list[TensorEntry]:
        ordered = sorted(tensors, key=lambda tensor: -tensor.itemsize)
        return [tensor.model_copy(update={"file": None}) for tensor in ordered]

    def lay_out(
        self, rank: int, mine: Sequence[Span], tensors: Mapping[str, TensorEntry]
    ) -> Layout:
        name = f"rank-{rank:05d}.safetensors"
        entries = [_entry(span, tensors[span.key]) for span in mine]
        head = header(entries, metadata={"format": "pt"}, align=ALIGN)
        places = list(itertools.accumulate((e.size for e in entries), initial=len(head)))
        size, digest = places[-1], xxh3_64_intdigest(head)
        return Layout(
            files=[NewFile(name=name, size=size, shared=False)],
            described=[DataFile(name=name, size=size, data_start=len(head), header=digest)],
            heads={0: head},
            pieces=[(span, 0, place) for span, place in zip(mine, places, strict=False)],
        )


def _entry(span: Span, tensor: TensorEntry) -> Entry:
    length = span.stop - span.start
    whole = length == tensor.numel
    return Entry(
        name=span.key if whole else f"{span.key}@{span.start}",
        dtype=tensor.dtype,
        shape=tensor.shape if whole else (length,),
        size=length * ITEM_BYTES[tensor.dtype],
    )
