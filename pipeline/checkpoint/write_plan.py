"""The division of a state's writing among ranks, settled once a run, before the first save.

Every rank reports its shards to rank 0 in two messages, `common` and `own`. `common` is the same
byte for byte on replicas and on ranks with shards that are alike, so rank 0 groups the ranks by it.
It divides the work, replicas sharing it; then each rank lays out its own files. Only rank 0's work
grows with the ranks.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pipeline.checkpoint import rng_state
from pipeline.checkpoint.division import CoverageError, Division, Piece, Tile
from pipeline.checkpoint.file_layout import FileLayout, RankFiles
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


class HeldTile(NamedTuple):
    """A tile of a tensor that a rank holds."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    tile: Tile


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """A rank's files, and what the manifest of every checkpoint says about all ranks."""

    rank_files: RankFiles
    template: ManifestTemplate
    """Manifest template; it lists files on rank 0 only."""
    own_keys: Set[str]
    """Keys of the tensors that this rank's engine has a part of."""
    on_host: Set[str]
    """Keys of those in this machine's memory."""


def plan_writes(
    engine: Engine, dist: DistContext, file_layout: FileLayout, without: Set[str] = frozenset()
) -> WritePlan:
    """Agree with all ranks (collective), `without` some parameters. Raises StageError."""
    own, on_host = list[HeldTile](), set[str]()
    for fragment in engine.fragments():
        for kind, tensor in fragment.state.items() if fragment.name not in without else ():
            if tensor.numel():
                key = f"{kind}/{fragment.name}"
                shape, tile = tuple(fragment.shape), tile_of(fragment)
                own.append(HeldTile(key, CODES[tensor.dtype], shape, tile))
                if tensor.device.type == "cpu":
                    on_host.add(key)
    random = [
        HeldTile(random_key(engine.random_stream, name), "U8", (len(state),), Tile(0, len(state)))
        for name, state in rng_state.capture(dist.device).items()
    ]
    reports = zip(*(dist.collect(message) for message in report(own, random)), strict=True)
    writer = {"engine": dict(engine.describe()), "packages": versions()}
    text = divide(list(reports), file_layout, writer).model_dump_json() if dist.is_main else None
    template = ManifestTemplate.model_validate_json(dist.broadcast_str(text))
    own_tiles = template.division.of_rank(dist.rank)
    rank_files = file_layout.lay_out(dist.rank, own_tiles, template.tensors)
    described = dist.collect(json.dumps([f.model_dump() for f in rank_files.described]).encode())
    files = [DataFile(**file) for files in described for file in json.loads(files)]
    template = template.model_copy(update={"files": files})
    keys = {shard.key for shard in own}
    return WritePlan(rank_files=rank_files, template=template, own_keys=keys, on_host=on_host)


def report(shards: Sequence[HeldTile], random: Sequence[HeldTile]) -> tuple[bytes, bytes]:
    """The messages of a rank, common and own. The common one has its tensors: key, dtype, shape,
    and the number of its list of tiles. The own one has these lists, and the `random` states as in
    the common one."""
    tiles: dict[str, list[Tile]] = defaultdict(list)
    for shard in (*shards, *random):
        tiles[shard.key].append(shard.tile)
    numbers: dict[tuple[object, ...], int] = {}

    def listed(own: Sequence[HeldTile]) -> dict[str, tuple[object, ...]]:
        return {
            key: (dtype, shape, numbers.setdefault((shape, *tiles[key]), len(numbers)))
            for key, dtype, shape, _ in own
        }

    common, random_states = listed(shards), listed(random)
    tile_lists = [own for _, *own in numbers]
    common_text, own_text = json.dumps(common), json.dumps([tile_lists, random_states])
    return zlib.compress(common_text.encode()), zlib.compress(own_text.encode())


def divide(
    messages: Sequence[tuple[bytes, bytes]], file_layout: FileLayout, writer: Mapping[str, Any]
) -> ManifestTemplate:
    """Divide the work, given every rank's report. Returns a manifest without files. Raises
    StageError unless the reports agree and make up every tensor."""
    members: dict[bytes, list[int]] = defaultdict(list)
    for rank, (common, _) in enumerate(messages):
        members[common].append(rank)
    groups = [(ranks, json.loads(zlib.decompress(text))) for text, ranks in members.items()]
    own_parts = [json.loads(zlib.decompress(own)) for _, own in messages]
    tile_lists = [[[Tile(*tile) for tile in tiles] for tiles in lists] for lists, _ in own_parts]
    groups += [([rank], random) for rank, (_, random) in enumerate(own_parts)]
    facts: dict[str, tuple[str, list[int]]] = {}
    parts: dict[str, list[tuple[int, int]]] = defaultdict(list)
    """The groups that hold some of a tensor, and the number of its list of tiles on their ranks."""
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
    holder_pattern = [alike.setdefault(tuple(parts[tensor.key]), len(alike)) for tensor in tensors]
    held_by = (sorted((rank, n) for group, n in own for rank in groups[group][0]) for own in alike)
    holders = [_holders((rank, tile_lists[rank][n]) for rank, n in own) for own in held_by]
    division = share_writing(holder_pattern, holders, len(messages))
    try:
        division.require_whole({tensor.key: tensor.shape for tensor in tensors}, len(messages))
    except CoverageError as error:
        raise StageError(f"the ranks' parts do not make up {error}") from None
    return ManifestTemplate.model_construct(
        world_size=len(messages), writer=writer, tensors=tensors, division=division, files=[]
    )


def _holders(lists: Iterable[tuple[int, Sequence[Tile]]]) -> Holders:
    """Who holds which tiles, given ranks and their lists of tiles."""
    holders: dict[Tile, list[int]] = defaultdict(list)
    for rank, tiles in lists:
        for tile in tiles:
            holders[tile].append(rank)
    return holders


def share_writing(
    holder_pattern: Sequence[int], holders: Sequence[Holders], ranks: int
) -> Division:
    """Divide the writing of tensors; tensor n is held as `holders[holder_pattern[n]]` says.

    Of tiles that several ranks hold, large ones are cut evenly between them. Small ones are put in
    batches; for each tensor, one column of a batch's [tile, holder] writes its tiles: the one whose
    busiest rank has least to write. That keeps distinct patterns few, and the manifest small.
    """
    load = np.zeros(ranks, np.int64)
    split = [_in_batches(tiles) for tiles in holders]
    for number, times in Counter(holder_pattern).items():
        for piece in split[number][0]:
            load[piece.rank] += piece.tile.numel * times
    largest = [max((t.numel for tiles, _ in own for t in tiles), default=0) for _, own in split]
    patterns: dict[tuple[Piece, ...], int] = {}
    seen: dict[tuple[int, ...], int] = {}
    chosen = [0] * len(holder_pattern)
    for tensor in sorted(range(len(chosen)), key=lambda tensor: -largest[holder_pattern[tensor]]):
        number = holder_pattern[tensor]
        fixed, batches = split[number]
        columns = list[int]()
        for tiles, holder_ranks in batches:
            columns.append(int(load[holder_ranks].max(axis=0).argmin()))
            np.add.at(load, holder_ranks[:, columns[-1]], [tile.numel for tile in tiles])
        if (number, *columns) not in seen:
            taken = [
                Piece(int(rank), *tile)
                for (tiles, holder_ranks), column in zip(batches, columns, strict=True)
                for tile, rank in zip(tiles, holder_ranks[:, column], strict=True)
            ]
            pieces = tuple(sorted(fixed + taken, key=lambda piece: piece[1:]))
            seen[number, *columns] = patterns.setdefault(pieces, len(patterns))
        chosen[tensor] = seen[number, *columns]
    return Division.model_construct(tensors=chosen, patterns=[*patterns])


def _in_batches(holders: Holders) -> tuple[list[Piece], list[tuple[list[Tile], np.ndarray]]]:
    """The pieces that have no choice of rank, and batches of the other tiles: tiles with equally
    many holders, no two with the same list, and a matrix [tile, holder] of ranks."""
    fixed: list[Piece] = []
    batches: dict[tuple[int, int], list[Tile]] = defaultdict(list)
    seen: Counter[tuple[int, ...]] = Counter()
    for tile, ranks in holders.items():
        if len(ranks) == 1 or tile.numel >= WORTH_A_CUT * len(ranks):
            fixed += _cut(tile, ranks)
        else:
            batches[len(ranks), seen[tuple(ranks)]].append(tile)
            seen[tuple(ranks)] += 1
    return fixed, [(own, np.array([holders[tile] for tile in own])) for own in batches.values()]


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
