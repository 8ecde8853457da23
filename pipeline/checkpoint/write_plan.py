"""The division of a state's writing among ranks, settled once a run, before the first save.

Every rank reports its shards to rank 0, which divides the work, replicas sharing it; then each rank
lays out its own files. Only rank 0's work grows with the ranks.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pipeline.checkpoint import rng_state
from pipeline.checkpoint.division import CoverageError, Division, Piece, Tile
from pipeline.checkpoint.file_layout import FileLayout, Layout
from pipeline.checkpoint.manifest import DataFile, ManifestTemplate, TensorEntry
from pipeline.errors import StageError
from pipeline.utils.packages import versions

if TYPE_CHECKING:
    from pipeline.contracts.engine import Engine, EngineState, Fragment
    from pipeline.distributed.process_group import DistContext

CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes in the safetensors format."""
DTYPES = {code: dtype for dtype, code in CODES.items()}
RANDOM = "random"
"""Kind of state of the generators of random numbers."""
WORTH_A_CUT = 1 << 18
"""Elements; ranks do not share the writing of fewer each."""

Holders = Mapping[Tile, Sequence[int]]
"""Tiles of a tensor, and the ranks that hold each, in order."""


def as_bytes(flat: torch.Tensor) -> memoryview:
    """The memory of a contiguous flat tensor on the CPU."""
    return memoryview(flat.detach().view(torch.uint8).numpy().data)


def tile_of(fragment: Fragment) -> Tile:
    """The tile of the tensor that a fragment is."""
    return Tile(fragment.start, fragment.stop, fragment.stride, fragment.count)


def random_key(stream: int, name: str) -> str:
    """Key of the state of a generator, given the number of its stream."""
    return f"{RANDOM}/{stream:05d}/{name}"


def without_frozen_base(engine: Engine, frozen_base: Set[str]) -> EngineState:
    """Engine state without the frozen weights that the model source can supply again."""
    state = engine.state()
    return dataclasses.replace(
        state,
        shapes={name: shape for name, shape in state.shapes.items() if name not in frozen_base},
        aliases={name: kept for name, kept in state.aliases.items() if kept not in frozen_base},
        frozen=[name for name in state.frozen if name not in frozen_base],
    )


class LocalShard(NamedTuple):
    """A tile of a tensor that a rank holds."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    tile: Tile


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """A rank's layout, and what the manifest of every checkpoint says about all ranks."""

    layout: Layout
    template: ManifestTemplate
    """Manifest template; it lists files on rank 0 only."""
    held: Set[str]
    """Keys of the tensors that this rank's engine has a part of."""
    on_host: Set[str]
    """Keys of those in this machine's memory."""


def plan_writes(
    engine: Engine, dist: DistContext, file_layout: FileLayout, without: Set[str] = frozenset()
) -> WritePlan:
    """Agree with all ranks (collective), `without` some parameters. Raises StageError."""
    own, on_host = list[LocalShard](), set[str]()
    for fragment in engine.fragments():
        for kind, tensor in fragment.state.items() if fragment.name not in without else ():
            if tensor.numel():
                key = f"{kind}/{fragment.name}"
                shape, tile = tuple(fragment.shape), tile_of(fragment)
                own.append(LocalShard(key, CODES[tensor.dtype], shape, tile))
                if tensor.device.type == "cpu":
                    on_host.add(key)
    random = [
        LocalShard(random_key(engine.random_stream, name), "U8", (len(state),), Tile(0, len(state)))
        for name, state in rng_state.capture(dist.device).items()
    ]
    reports = zip(*(dist.collect(message) for message in report(own, random)), strict=True)
    writer = {"engine": dict(engine.describe()), "packages": versions()}
    text = divide(list(reports), file_layout, writer).model_dump_json() if dist.is_main else None
    template = ManifestTemplate.model_validate_json(dist.broadcast_str(text))
    own_tiles = template.division.of_rank(dist.rank)
    layout = file_layout.lay_out(dist.rank, own_tiles, template.tensors)
    described = dist.collect(json.dumps([file.model_dump() for file in layout.described]).encode())
    files = [DataFile(**file) for files in described for file in json.loads(files)]
    template = template.model_copy(update={"files": files})
    held = {shard.key for shard in own}
    return WritePlan(layout=layout, template=template, held=held, on_host=on_host)


def report(shards: Sequence[LocalShard], random: Sequence[LocalShard]) -> tuple[bytes, bytes]:
    """Messages of a rank to rank 0. The first has its tensors: key, dtype, shape, and a number for
    the tiles; as it is the same on most ranks, it is decoded once. The second has the tiles, and
    the `random` states as in the first."""
    tiles: dict[str, list[Tile]] = defaultdict(list)
    for shard in (*shards, *random):
        tiles[shard.key].append(shard.tile)
    numbers: dict[tuple[object, ...], int] = {}

    def listed(own: Sequence[LocalShard]) -> dict[str, tuple[object, ...]]:
        return {
            key: (dtype, shape, numbers.setdefault((shape, *tiles[key]), len(numbers)))
            for key, dtype, shape, _ in own
        }

    first, second = listed(shards), listed(random)
    held = [own for _, *own in numbers]
    first_text, second_text = json.dumps(first), json.dumps([held, second])
    return zlib.compress(first_text.encode()), zlib.compress(second_text.encode())


def divide(
    messages: Sequence[tuple[bytes, bytes]], file_layout: FileLayout, writer: Mapping[str, Any]
) -> ManifestTemplate:
    """Divide the work, given every rank's report. Returns a manifest without files. Raises
    StageError unless the reports agree and make up every tensor."""
    members: dict[bytes, list[int]] = defaultdict(list)
    for rank, (first, _) in enumerate(messages):
        members[first].append(rank)
    seconds = [json.loads(zlib.decompress(second)) for _, second in messages]
    tiles = [[[Tile(*tile) for tile in own] for own in held] for held, _ in seconds]
    groups = [(ranks, json.loads(zlib.decompress(text))) for text, ranks in members.items()]
    groups += [([rank], random) for rank, (_, random) in enumerate(seconds)]
    facts: dict[str, tuple[str, list[int]]] = {}
    parts: dict[str, list[tuple[int, int]]] = defaultdict(list)
    """The groups that hold some of a tensor, and the number of its tiles on their ranks."""
    for group, (_, listed) in enumerate(groups):
        for key, (dtype, shape, number) in listed.items():
            if facts.setdefault(key, (dtype, shape)) != (dtype, shape):
                raise StageError(f"{key}: ranks differ in its shape or dtype")
            parts[key].append((group, number))
    tensors = file_layout.in_order(
        TensorEntry(key=key, dtype=dtype, shape=tuple(shape))
        for key, (dtype, shape) in facts.items()
    )
    alike: dict[tuple[tuple[int, int], ...], int] = {}
    numbers = [alike.setdefault(tuple(parts[tensor.key]), len(alike)) for tensor in tensors]
    holders: list[dict[Tile, list[int]]] = [defaultdict(list) for _ in alike]
    for number, own in enumerate(alike):
        for rank, held in sorted((rank, n) for group, n in own for rank in groups[group][0]):
            for tile in tiles[rank][held]:
                holders[number][tile].append(rank)
    division = share_writing(numbers, holders, len(messages))
    try:
        division.require_whole({tensor.key: tensor.shape for tensor in tensors}, len(messages))
    except CoverageError as error:
        raise StageError(f"the ranks' parts do not make up {error}") from None
    return ManifestTemplate.model_construct(
        world_size=len(messages), writer=writer, tensors=tensors, division=division, files=[]
    )


def share_writing(held: Sequence[int], holders: Sequence[Holders], ranks: int) -> Division:
    """Divide the writing of tensors; tensor n is held as `holders[held[n]]` says.

    Of tiles that several ranks hold, large ones are cut evenly between them; of the small ones of a
    tensor, holder number n of each writes all. Either goes where the least is to write.
    """
    load = np.zeros(ranks, np.int64)
    fixed: list[list[Piece]] = [[] for _ in holders]
    free: list[list[tuple[list[Tile], np.ndarray]]] = [[] for _ in holders]
    """Tiles with as many holders, other ones each, which are the rows of a matrix."""
    times = Counter(held)
    for number, tiles in enumerate(holders):
        small: dict[tuple[int, int], list[Tile]] = defaultdict(list)
        known: Counter[tuple[int, ...]] = Counter()
        for tile, own in tiles.items():
            if len(own) == 1 or tile.numel >= WORTH_A_CUT * len(own):
                fixed[number] += _cut(tile, own)
            else:
                small[len(own), known[tuple(own)]].append(tile)
                known[tuple(own)] += 1
        free[number] = [(few, np.array([tiles[tile] for tile in few])) for few in small.values()]
        for piece in fixed[number]:
            load[piece.rank] += piece.tile.numel * times[number]
    largest = [max((tile.numel for few, _ in own for tile in few), default=0) for own in free]
    layouts: dict[tuple[Piece, ...], int] = {}
    known_choices: dict[tuple[int, ...], int] = {}
    chosen = [0] * len(held)
    for tensor in sorted(range(len(held)), key=lambda tensor: -largest[held[tensor]]):
        number, choice = held[tensor], []
        for few, matrix in free[number]:
            choice.append(int(load[matrix].max(axis=0).argmin()))
            np.add.at(load, matrix[:, choice[-1]], [tile.numel for tile in few])
        if (number, *choice) not in known_choices:
            taken = [
                Piece(int(own[n]), *tile)
                for n, (few, matrix) in zip(choice, free[number], strict=True)
                for tile, own in zip(few, matrix, strict=True)
            ]
            pieces = tuple(sorted(fixed[number] + taken, key=lambda piece: piece[1:]))
            known_choices[number, *choice] = layouts.setdefault(pieces, len(layouts))
        chosen[tensor] = known_choices[number, *choice]
    return Division.model_construct(tensors=chosen, layouts=[*layouts])


def _cut(tile: Tile, ranks: Sequence[int]) -> Iterator[Piece]:
    """The tile in as equal parts for the ranks as its rows allow, or a flat tile's elements."""
    start, stop, stride, count = tile
    units = count if stride else tile.numel
    step = -(-units // len(ranks))
    for rank, low in zip(ranks, range(0, units, step), strict=False):
        high = min(low + step, units)
        if stride:
            yield Piece(rank, start + low * stride, stop + low * stride, stride, high - low)
        else:
            yield Piece(rank, start + low, start + high)
