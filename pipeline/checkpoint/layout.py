"""The division of a state's writing among ranks, settled once a run, before the first save.

Every rank reports its shards to rank 0, which divides the work, replicas sharing it, and states the
result by rule; then each rank lays out its own files. Only rank 0's work grows with the ranks.
"""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pipeline.checkpoint import rng_state
from pipeline.checkpoint.file_layout import FileLayout, Layout, Span
from pipeline.checkpoint.manifest import (
    LARGEST,
    MOST_TENSORS,
    CoverageError,
    DataFile,
    Run,
    TensorEntry,
    require_whole,
)
from pipeline.checkpoint.places import Division, Pieces
from pipeline.checkpoint.writer_main import ManifestTemplate
from pipeline.errors import StageError
from pipeline.utils.versions import versions

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
"""Names of dtypes in the safetensors format."""
DTYPES = {code: dtype for dtype, code in CODES.items()}

WORTH_A_CUT = 1 << 18
"""Elements; ranks do not share the writing of less each."""


def as_bytes(flat: torch.Tensor) -> memoryview:
    """The memory of a contiguous flat tensor on the CPU."""
    return memoryview(flat.detach().view(torch.uint8).numpy().data)


def random_key(rank: int, name: str) -> str:
    """Key of the state of a rank's generator."""
    return f"random/{rank:05d}/{name}"


class LocalShard(NamedTuple):
    """Elements [start, stop) of a tensor that a rank holds, `on_host` or on an accelerator."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    on_host: bool


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """A rank's layout, and what the manifest of every checkpoint says about all ranks."""

    layout: Layout
    template: ManifestTemplate
    """Without files on ranks other than 0."""
    held: Set[str]
    """Keys of the tensors of which this rank's engine has a part."""
    on_host: Set[str]
    """Keys of those that lie in this machine's memory."""


def plan_writes(
    engine: Engine, dist: DistContext, file_layout: FileLayout, without: Set[str] = frozenset()
) -> WritePlan:
    """Agree with all ranks (collective); parameters `without` are not written. Raises StageError
    when the ranks' parts do not make up the tensors."""
    own = _held(engine, without)
    random = {name: len(state) for name, state in rng_state.capture(dist.device).items()}
    messages = dist.collect(message(own, random))
    text = dist.broadcast_str(divided(messages, file_layout) if dist.is_main else None)
    tensors, runs = unpacked(text)
    layout = file_layout.lay_out(
        dist.rank, spans_of(dist.rank, tensors, runs), {entry.key: entry for entry in tensors}
    )
    described = dist.collect(json.dumps([file.model_dump() for file in layout.described]).encode())
    template = ManifestTemplate(
        world_size=dist.world_size,
        writer={"engine": dict(engine.describe()), "packages": versions()},
        tensors=tensors,
        runs=runs,
        files=[DataFile(**file) for files in described for file in json.loads(files)],
    )
    return WritePlan(
        layout=layout,
        template=template,
        held={shard.key for shard in own},
        on_host={shard.key for shard in own if shard.on_host},
    )


def _held(engine: Engine, without: Set[str]) -> list[LocalShard]:
    return [
        LocalShard(
            f"{kind}/{part.name}", CODES[tensor.dtype], tuple(part.shape), part.start, part.stop,
            tensor.device.type == "cpu",
        )
        for part in engine.fragments()
        for kind, tensor in part.state.items()
        if tensor.numel() and part.name not in without
    ]  # fmt: skip


def message(own: Sequence[LocalShard], random: Mapping[str, int]) -> bytes:
    """Message of a rank to rank 0: tensors, ranges of them, sizes of random states in bytes. The
    first is equal on most ranks, so that rank 0 parses it once."""
    table = zlib.compress(json.dumps([[h.key, h.dtype, h.shape] for h in own]).encode())
    ranges = np.array([(h.start, h.stop) for h in own], dtype="<i8").tobytes()
    return json.dumps({"random": random, "table": len(table)}).encode() + b"\n" + table + ranges


def divided(messages: Sequence[bytes], file_layout: FileLayout) -> str:
    """All tensors in order and who writes them, from every rank's message; for `unpacked`. Raises
    StageError for more tensors than keys have room for."""
    known: dict[bytes, NDArray[np.int64]] = {}
    numbers: dict[str, int] = {}
    entries: list[TensorEntry] = []
    held, random = [], []
    for rank, received in enumerate(messages):
        begin = received.index(b"\n") + 1
        facts = json.loads(received[:begin])
        end = begin + facts["table"]
        table = received[begin:end]
        if table not in known:
            own = list(_numbered(json.loads(zlib.decompress(table)), numbers, entries))
            known[table] = np.array(own, dtype=np.int64)
        columns = np.frombuffer(received, "<i8", offset=end).reshape(-1, 2).T
        held.append(Pieces(known[table], *columns))
        random += [(rank, random_key(rank, name), size) for name, size in facts["random"].items()]
    tensors = file_layout.in_order(
        [*entries, *(TensorEntry(key=key, dtype="U8", shape=(size,)) for _, key, size in random)]
    )
    if len(tensors) > MOST_TENSORS:
        raise StageError(f"a checkpoint has room for {MOST_TENSORS} tensors, not {len(tensors)}")
    runs = {key: [Run(0, size, size, rank)] for rank, key, size in random}
    try:
        runs.update(zip(numbers, share_writing(held, [e.numel for e in entries]), strict=True))
    except CoverageError as error:
        key = entries[error.tensor].key
        raise StageError(f"the ranks' parts of {key} do not make it up: {error}") from None
    made = [[*entry.model_dump().values(), runs[entry.key]] for entry in tensors]
    return base64.b64encode(zlib.compress(json.dumps(made).encode())).decode()


def unpacked(text: str) -> tuple[list[TensorEntry], list[list[Run]]]:
    """The division that rank 0 has made: tensors in order, and the runs of each."""
    tensors, runs = [], []
    for key, dtype, shape, file, own in json.loads(zlib.decompress(base64.b64decode(text))):
        tensors.append(TensorEntry(key=key, dtype=dtype, shape=tuple(shape), file=file))
        runs.append([Run(*run) for run in own])
    return tensors, runs


def spans_of(
    rank: int, tensors: Sequence[TensorEntry], runs: Sequence[Sequence[Run]]
) -> list[Span]:
    """Spans that a rank writes, in order."""
    rows = zip(*(column.tolist() for column in Division(runs).of(rank)), strict=True)
    return [Span(tensors[number].key, start, stop) for number, start, stop in rows]


def _numbered(
    table: Iterable[Any], numbers: dict[str, int], entries: list[TensorEntry]
) -> Iterator[int]:
    """The numbers of a rank's tensors; new ones are entered."""
    for key, dtype, shape in table:
        entry = TensorEntry(key=key, dtype=dtype, shape=tuple(shape))
        number = numbers.setdefault(key, len(entries))
        if number == len(entries):
            entries.append(entry)
        if entries[number] != entry:
            raise StageError(f"{key}: ranks differ in its shape or dtype")
        yield number


class _Family(NamedTuple):
    """Consecutive parts of a tensor, all of one length and held by the same number of ranks."""

    tensor: int
    start: int
    stop: int
    length: int
    ranks: NDArray[np.int32]
    """Shape (parts, holders of each)."""


def share_writing(held: Sequence[Pieces], numels: Sequence[int]) -> list[list[Run]]:
    """The runs of every tensor, given each rank's pieces and the tensors' numbers of elements.

    A range that several ranks hold is cut evenly between them; a small one goes to the holder with
    the least to write. Raises CoverageError when the pieces do not make up the tensors.
    """
    load = np.zeros(len(held), dtype=np.int64)
    runs: list[list[Run]] = [[] for _ in numels]
    for family in sorted(_families(held, len(numels)), key=lambda family: -family.length):
        runs[family.tensor] += _share(family, load)
    for own in runs:
        own.sort()
    require_whole(runs, numels, len(held))
    return runs


def _share(family: _Family, load: NDArray[np.int64]) -> Iterator[Run]:
    """Divide a family among its holders; adds to the ranks' `load`, in elements."""
    _, start, stop, length, ranks = family
    if length < WORTH_A_CUT * ranks.shape[1]:
        least = int(load[ranks].max(axis=0).argmin())
        ranks = ranks[:, least : least + 1]
    cut = -(-length // ranks.shape[1])
    load[ranks] += cut
    if (steps := _steps(ranks)) is not None:
        yield Run(start, stop, length, int(ranks[0, 0]), *steps)
        return
    for rank, low in zip(ranks[0].tolist(), range(start, stop, cut), strict=False):
        high = min(low + cut, stop)
        yield Run(low, high, high - low, rank)


def _steps(ranks: NDArray[np.int32]) -> tuple[int, int, int] | None:
    """Step from part to part, number of holders, and step from holder to holder; None if one run
    cannot express the ranks."""
    parts, holders = ranks.shape
    step = int(ranks[1, 0] - ranks[0, 0]) if parts > 1 else 0
    apart = int(ranks[0, 1] - ranks[0, 0]) if holders > 1 else 0
    grid = ranks[0, 0] + step * np.arange(parts)[:, None] + apart * np.arange(holders)
    is_clear = step >= 0 and Run(0, parts, 1, 0, step, holders, apart).is_clear
    return (step, holders, apart) if is_clear and (ranks == grid).all() else None


def _families(held: Sequence[Pieces], tensors: int) -> Iterator[_Family]:
    key = np.concatenate([pieces.tensor * LARGEST + pieces.start for pieces in held])
    key = key[order := np.argsort(key, kind="stable")]
    counts = [len(pieces.tensor) for pieces in held]
    stop = np.concatenate([pieces.stop for pieces in held])[order]
    rank = np.repeat(np.arange(len(held), dtype=np.int32), counts)[order]
    edges = np.searchsorted(key, np.arange(tensors + 1) * LARGEST).tolist()
    for tensor, (low, high) in enumerate(itertools.pairwise(edges)):
        start = key[low:high] - tensor * LARGEST
        yield from _families_of(tensor, start, stop[low:high], rank[low:high])


def _families_of(
    tensor: int, start: NDArray[np.int64], stop: NDArray[np.int64], rank: NDArray[np.int32]
) -> Iterator[_Family]:
    """One family if the tensor's parts are as regular as strategies cut them, else one a part."""
    if not len(start):
        return
    different = (start[1:] != start[:-1]) | (stop[1:] != stop[:-1])
    edges = [0, *(np.flatnonzero(different) + 1).tolist(), len(start)]
    parts = len(edges) - 1
    length = int(stop[0] - start[0])
    begins = start[edges[:-1]]
    regular = len(start) % parts == 0 and bool(
        (np.diff(edges) == len(start) // parts).all()
        and (begins == begins[0] + length * np.arange(parts)).all()
        and (stop[edges[:-2]] == begins[1:]).all()
        and stop[-1] - start[-1] <= length
    )
    ranks = rank.reshape(parts, -1) if regular else None
    if ranks is not None and (parts == 1 or _steps(ranks)):
        yield _Family(tensor, int(start[0]), int(stop[-1]), length, ranks)
        return
    for low, high in itertools.pairwise(edges):
        first, last = int(start[low]), int(stop[low])
        yield _Family(tensor, first, last, last - first, rank[None, low:high])
