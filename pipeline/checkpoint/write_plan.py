"""The tensors of a training state as checkpoints name them, and the division of their writing among
ranks, settled once a run, before the first save.

Every rank reports its shards to rank 0 in two messages, `common` and `own`. `common` is the same
byte for byte on replicas and on ranks with shards that are alike, so rank 0 groups the ranks by it.
It divides the work, replicas sharing it; then each rank lays out its own files. Only rank 0's work
grows with the ranks.

Part of the state are random generators, as bytes of fixed sizes. Ranks that compute copies of one
thing share a stream. With another number of streams the saved ones have no owners; then new ones
start from a digest of the recipe's seed, the step, the stream's number and the number of streams.
"""

from __future__ import annotations

import dataclasses
import json
import random
import struct
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pipeline.checkpoint.division import CoverageError, Division, Piece, Tile
from pipeline.checkpoint.file_layout import FileLayout, RankFiles
from pipeline.checkpoint.manifest import DataFile, ManifestTemplate, TensorEntry
from pipeline.errors import StageError
from pipeline.utils.packages import versions

if TYPE_CHECKING:
    from pipeline.contracts.engine import Engine, EngineState
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
GENERATORS = ("torch", "python", "numpy", "cuda")
_PYTHON = "<625I?d"
_NUMPY = "<624Ii?d"
WORTH_A_CUT = 1 << 18
"""Elements; ranks do not share the writing of fewer each."""

Holders = Mapping[Tile, Sequence[int]]
"""Tiles of a tensor, and the ranks that hold each, in order."""


def as_bytes(flat: torch.Tensor) -> memoryview:
    """The memory of a contiguous flat tensor on the CPU."""
    return memoryview(flat.detach().view(torch.uint8).numpy().data)


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


def capture_random(device: torch.device) -> dict[str, bytes]:
    """States of the generators of torch (of the CPU, and of `device`), Python and numpy."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": struct.pack(_PYTHON, *words, gauss is not None, gauss or 0.0),
        "numpy": struct.pack(_NUMPY, *keys, position, bool(has_gauss), cached),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return states


def apply_random(states: Mapping[str, bytes], device: torch.device) -> None:
    """Bring this rank's generators to the captured states; those without one stay unchanged."""
    if "torch" in states:
        torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
    if "python" in states:
        *words, has_gauss, gauss = struct.unpack(_PYTHON, states["python"])
        random.setstate((3, tuple(words), gauss if has_gauss else None))
    if "numpy" in states:
        *keys, position, has_gauss, gauss = struct.unpack(_NUMPY, states["numpy"])
        np.random.set_state(("MT19937", np.array(keys, np.uint32), position, int(has_gauss), gauss))
    if "cuda" in states and device.type == "cuda":
        state = torch.frombuffer(bytearray(states["cuda"]), dtype=torch.uint8)
        torch.cuda.set_rng_state(state, device)


def start_random_streams(number: int) -> None:
    """Start streams of torch, Python and numpy that are a pure function of `number`."""
    torch.manual_seed(number % 2**63)
    random.seed(number)
    np.random.seed(number % 2**32)


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
        tile = Tile(fragment.start, fragment.stop, fragment.stride, fragment.count)
        for kind, tensor in fragment.state.items() if fragment.name not in without else ():
            if tensor.numel():
                key = f"{kind}/{fragment.name}"
                own.append(HeldTile(key, CODES[tensor.dtype], tuple(fragment.shape), tile))
                if tensor.device.type == "cpu":
                    on_host.add(key)
    generators = [
        HeldTile(random_key(engine.random_stream, name), "U8", (len(state),), Tile(0, len(state)))
        for name, state in capture_random(dist.device).items()
    ]
    reports = zip(*(dist.collect(message) for message in report(own, generators)), strict=True)
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


def report(shards: Sequence[HeldTile], generators: Sequence[HeldTile]) -> tuple[bytes, bytes]:
    """The messages of a rank, common and own. The common one has its tensors: key, dtype, shape,
    and the number of its list of tiles. The own one has these lists, and the states of random
    generators as in the common one."""
    tiles: dict[str, list[Tile]] = defaultdict(list)
    for shard in (*shards, *generators):
        tiles[shard.key].append(shard.tile)
    numbers: dict[tuple[object, ...], int] = {}
    common, own = (
        {
            key: (dtype, shape, numbers.setdefault((shape, *tiles[key]), len(numbers)))
            for key, dtype, shape, _ in held
        }
        for held in (shards, generators)
    )
    texts = json.dumps(common), json.dumps([[tiles for _, *tiles in numbers], own])
    common_text, own_text = (zlib.compress(text.encode()) for text in texts)
    return common_text, own_text


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
    holders: list[dict[Tile, list[int]]] = []
    for own in held_by:
        holders.append(defaultdict(list))
        for rank, number in own:
            for tile in tile_lists[rank][number]:
                holders[-1][tile].append(rank)
    division = share_writing(holder_pattern, holders, len(messages))
    try:
        division.require_whole({tensor.key: tensor.shape for tensor in tensors}, len(messages))
    except CoverageError as error:
        raise StageError(f"the ranks' parts do not make up {error}") from None
    return ManifestTemplate.model_construct(
        world_size=len(messages), writer=writer, tensors=tensors, division=division, files=[]
    )


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
            load[piece.rank] += Tile(*piece[1:]).numel * times
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
        if len(ranks) > 1 and tile.numel < WORTH_A_CUT * len(ranks):
            batches[len(ranks), seen[tuple(ranks)]].append(tile)
            seen[tuple(ranks)] += 1
            continue
        # in as equal parts for the ranks as its rows allow, or a flat tile's elements
        start, stop, stride, count = tile
        units = count if stride else tile.numel
        step = -(-units // len(ranks))
        for rank, low in zip(ranks, range(0, units, step), strict=False):
            high = min(low + step, units)
            if stride:
                begin, end = start + low * stride, stop + low * stride
                fixed.append(Piece(rank, begin, end, stride, high - low))
            else:
                fixed.append(Piece(rank, start + low, start + high))
    return fixed, [(own, np.array([holders[tile] for tile in own])) for own in batches.values()]
