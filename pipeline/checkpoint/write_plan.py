"""The division of a state's writing among ranks, settled once a run, before the first save.

Every rank reports its shards to rank 0, which divides the work, replicas sharing it, and states the
result by rule; then each rank lays out its own files. Only rank 0's work grows with the ranks.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pipeline.checkpoint import rng_state
from pipeline.checkpoint.division import CoverageError, KeyedTile, Run, row_lengths
from pipeline.checkpoint.file_layout import FileLayout, Layout
from pipeline.checkpoint.manifest import DataFile, ManifestTemplate, TensorEntry
from pipeline.checkpoint.sharing import Holders, share_writing
from pipeline.checkpoint.tiles import Tile
from pipeline.errors import StageError
from pipeline.utils.packages import versions

if TYPE_CHECKING:
    from pipeline.contracts.engine import Engine, EngineState, Fragment
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


RANDOM = "random"
"""Kind of state of the generators of random numbers."""


def as_bytes(flat: torch.Tensor) -> memoryview:
    """The memory of a contiguous flat tensor on the CPU."""
    return memoryview(flat.detach().view(torch.uint8).numpy().data)


def tile_of(fragment: Fragment) -> Tile:
    """The tile of the tensor that a fragment is."""
    return Tile(fragment.start, fragment.stop, fragment.stride, fragment.count)


def random_key(stream: int, name: str) -> str:
    """Key of the state of a generator, given the number of its stream."""
    return f"{RANDOM}/{stream:05d}/{name}"


def saved_streams(keys: Iterable[str]) -> set[int]:
    """Numbers of the streams of random numbers among the keys of tensors."""
    parts = (key.split("/") for key in keys)
    return {int(number) for kind, number, *_ in parts if kind == RANDOM}


class LocalShard(NamedTuple):
    """A tile of a tensor that a rank holds, `on_host` or on an accelerator."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    on_host: bool
    stride: int = 0
    count: int = 1  # type: ignore[assignment]  # hides tuple.count


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """A rank's layout, and what the manifest of every checkpoint says about all ranks."""

    layout: Layout
    template: ManifestTemplate
    """Manifest template; it lists files on rank 0 only."""
    held: Set[str]
    """Keys of the tensors that this rank's engine has a part of."""
    on_host: Set[str]
    """Keys of those that lie in this machine's memory."""


def plan_writes(
    engine: Engine, dist: DistContext, file_layout: FileLayout, without: Set[str] = frozenset()
) -> WritePlan:
    """Agree with all ranks (collective); parameters `without` are not written. Raises StageError
    when the ranks' parts do not make up the tensors."""
    own = _held(engine, without)
    random = [
        LocalShard(random_key(engine.random_stream, name), "U8", (len(state),), 0, len(state), True)
        for name, state in rng_state.capture(dist.device).items()
    ]
    messages = dist.collect(encode_shards([*own, *random]))
    text = dist.broadcast_str(divide(messages, file_layout) if dist.is_main else None)
    tensors, runs = decode_division(text)
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
            f"{kind}/{fragment.name}", CODES[tensor.dtype], tuple(fragment.shape),
            fragment.start, fragment.stop, tensor.device.type == "cpu", fragment.stride,
            fragment.count,
        )
        for fragment in engine.fragments()
        for kind, tensor in fragment.state.items()
        if tensor.numel() and fragment.name not in without
    ]  # fmt: skip


def without_frozen_base(engine: Engine, frozen_base: Set[str]) -> EngineState:
    """Engine state without the frozen weights that the model source can supply again."""
    state = engine.state()
    return dataclasses.replace(
        state,
        shapes={name: shape for name, shape in state.shapes.items() if name not in frozen_base},
        aliases={name: kept for name, kept in state.aliases.items() if kept not in frozen_base},
        frozen=[name for name in state.frozen if name not in frozen_base],
    )


def encode_shards(own: Sequence[LocalShard]) -> bytes:
    """Message of a rank to rank 0: what its shards are, each kind once, and their keys in order."""
    kinds: dict[Any, int] = {}
    keys = []
    for key, dtype, shape, start, stop, _, *columns in own:
        kind = dtype, tuple(shape), (start, stop, *columns)
        keys.append((key, kinds.setdefault(kind, len(kinds))))
    return zlib.compress(json.dumps([list(kinds), keys]).encode())


def divide(messages: Sequence[bytes], file_layout: FileLayout) -> str:
    """All tensors in order and who writes them, for `decode_division`, from every rank's message.
    Raises StageError unless the messages agree and make up every tensor."""
    facts: dict[str, Any] = {}
    holders = Holders()
    for rank, received in enumerate(messages):
        kinds, keys = json.loads(zlib.decompress(received))
        for _, shape, (_, _, stride, _) in kinds:
            if stride and stride not in row_lengths(shape):
                raise StageError(f"columns of rows of {stride} elements of a tensor of {shape}")
        tiles = [Tile(*tile) for _, _, tile in kinds]
        for key, kind in keys:
            fact = kinds[kind][:2]
            if facts.setdefault(key, fact) != fact:
                raise StageError(f"{key}: ranks differ in its shape or dtype")
            holders.add(rank, tiles[kind], key)
    entries = [TensorEntry(key=k, dtype=dtype, shape=shape) for k, (dtype, shape) in facts.items()]
    tensors = file_layout.in_order(entries)
    try:
        numels = {entry.key: entry.numel for entry in tensors}
        runs = share_writing(holders, numels, len(messages))
    except CoverageError as error:
        raise StageError(f"the ranks' parts do not make up {error}") from None
    made = ((t.model_dump(), own) for t, own in zip(tensors, runs, strict=True))
    return json.dumps([[t, [run if run.width else run[:7] for run in own]] for t, own in made])


def decode_division(text: str) -> tuple[list[TensorEntry], list[list[Run]]]:
    """The division that rank 0 has made: tensors in order, and the runs of each."""
    made = json.loads(text)
    return [TensorEntry(**entry) for entry, _ in made], [[Run(*r) for r in own] for _, own in made]


def spans_of(
    rank: int, tensors: Sequence[TensorEntry], runs: Sequence[Sequence[Run]]
) -> list[KeyedTile]:
    """Spans that a rank writes, in order."""
    pairs = zip(tensors, runs, strict=True)
    return [KeyedTile(t.key, *part) for t, own in pairs for run in own if (part := run.of(rank))]
