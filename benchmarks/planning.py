"""Measure a rank's plan of a checkpoint by the number of ranks: seconds, memory, manifest.

A 70B-shaped list of parameters with two moments, cut as FSDP, hybrid FSDP and ZeRO do it, and as
FSDP does it over tensor-parallel groups of 8 ranks. Every rank's report is made as on that rank;
then the work of rank 0 and of one other rank is measured in this process: `python
benchmarks/planning.py [RANKS ...]`, by default 1024 and 4096. The last lines are the strategies
that take rank 0 longest. Needs no GPU.
"""

from __future__ import annotations

import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pipeline.checkpoint.division import Tile
from pipeline.checkpoint.file_layout import SHARDED, RankFiles, plan_staging
from pipeline.checkpoint.manifest import DataFile, Manifest, ManifestTemplate, RankShare
from pipeline.checkpoint.reader import Places
from pipeline.checkpoint.write_plan import HeldTile, divide, random_key, report
from pipeline.contracts.engine import EngineState, ParameterGroup

T = TypeVar("T")
TENSOR_PARALLEL = 8
KINDS = ("weight", "exp_avg", "exp_avg_sq")
HIDDEN, MIDDLE, LAYERS, VOCABULARY, KV = 8192, 28672, 80, 128256, 1024

Tiles = Iterator[tuple[str, tuple[int, ...], Tile]]


def shapes() -> dict[str, tuple[int, ...]]:
    """Return names and shapes of Llama 70B's parameters."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", HIDDEN, HIDDEN), ("self_attn.k_proj", KV, HIDDEN),
            ("self_attn.v_proj", KV, HIDDEN), ("self_attn.o_proj", HIDDEN, HIDDEN),
            ("mlp.gate_proj", MIDDLE, HIDDEN), ("mlp.up_proj", MIDDLE, HIDDEN),
            ("mlp.down_proj", HIDDEN, MIDDLE),
        ):  # fmt: skip
            found[f"{at}.{name}.weight"] = (rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}.{name}.weight"] = (HIDDEN,)
    return {**found, "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


SHAPES = shapes()


def by_rows(rank: int, ranks: int) -> Tiles:
    """Cut as FSDP does: each tensor in chunks of equally many rows."""
    for name, shape in SHAPES.items():
        low, high = _chunk((0, shape[0]), ranks, rank)
        width = _numel(shape) // shape[0]
        yield name, shape, Tile(low * width, high * width)


def by_rows_of_tensor_parallel(rank: int, ranks: int) -> Tiles:
    """Cut as tensor parallelism does, by rows or columns in groups of 8, and then as FSDP does."""
    shard, own = divmod(rank, TENSOR_PARALLEL)
    for name, shape in SHAPES.items():
        rows, columns = (0, shape[0]), (0, _numel(shape) // shape[0])
        width, is_split = columns[1], name.endswith(("o_proj.weight", "down_proj.weight"))
        if is_split:
            columns = _chunk(columns, TENSOR_PARALLEL, own)
        elif "norm" not in name:
            rows = _chunk(rows, TENSOR_PARALLEL, own)
        low, high = _chunk(rows, ranks // TENSOR_PARALLEL, shard)
        if is_split:
            left, right = (low * width + column for column in columns)
            yield name, shape, Tile(left, right, width, high - low)
        else:
            yield name, shape, Tile(low * width, high * width)


def by_nodes_of_tensor_parallel(rank: int, ranks: int) -> Tiles:
    """Cut so over half of the ranks; the others hold copies."""
    yield from by_rows_of_tensor_parallel(rank % (ranks // 2), ranks // 2)


def by_rows_of_nodes(rank: int, ranks: int) -> Tiles:
    """Cut as hybrid FSDP does: by rows over half of the ranks; the others hold copies."""
    yield from by_rows(rank % (ranks // 2), ranks // 2)


def by_elements(rank: int, ranks: int) -> Tiles:
    """Cut as ZeRO-3 does: each tensor in chunks of equally many elements."""
    for name, shape in SHAPES.items():
        yield name, shape, Tile(*_chunk((0, _numel(shape)), ranks, rank))


def by_flat_range(rank: int, ranks: int) -> Tiles:
    """Cut as ZeRO-1 and 2 do: all tensors in sequence, in chunks of equally many elements."""
    chunk = -(-sum(map(_numel, SHAPES.values())) // ranks)
    low, end = rank * chunk, 0
    for name, shape in SHAPES.items():
        begin, end = end, end + _numel(shape)
        start, stop = max(low, begin), min(low + chunk, end)
        if start < stop:
            yield name, shape, Tile(start - begin, stop - begin)


def everything(rank: int, ranks: int) -> Tiles:
    """Cut as DDP does: every rank holds all elements."""
    del rank, ranks
    for name, shape in SHAPES.items():
        yield name, shape, Tile(0, _numel(shape))


STRATEGIES: dict[str, Callable[[int, int], Tiles]] = {
    "fsdp": by_rows, "fsdp hybrid": by_rows_of_nodes, "zero3": by_elements, "zero1": by_flat_range,
    "ddp": everything, "tp 8 x fsdp": by_rows_of_tensor_parallel,
    "tp 8 x fsdp hybrid": by_nodes_of_tensor_parallel,
}  # fmt: skip


def _chunk(own: tuple[int, int], count: int, number: int) -> tuple[int, int]:
    low, high = own
    size = -(-(high - low) // count)
    return min(low + number * size, high), min(low + (number + 1) * size, high)


def _numel(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def measured(strategy: str, ranks: int) -> dict[str, Any]:
    """Return the numbers of layouts and pieces, the MB of messages and manifest, and processor time
    and peak memory of rank 0's plan, of another rank's, and of opening the checkpoint."""
    reports = [_report(strategy, rank, ranks) for rank in range(ranks)]
    main, text = taken(lambda: _rank_0(reports))
    other, (shares, layout) = taken(lambda: _another(text, ranks // 2))
    data = _manifest(ranks, shares, layout).dump()
    opened, _ = taken(lambda: _opened(data, ranks // 2))
    received = sum(len(message) for own in reports for message in own)
    return {
        "strategy": strategy, "ranks": ranks, "received_mb": round(received / 1e6, 2),
        "shared_mb": round(len(text) / 1e6, 2), "manifest_mb": round(len(data) / 1e6, 2),
        "layouts": len(shares.division.patterns), "pieces": sum(map(len, shares.division.patterns)),
        "rank_0": main, "another": other, "opened": opened,
    }  # fmt: skip


def _rank_0(reports: list[tuple[bytes, bytes]]) -> str:
    """Do all that rank 0 does to plan; return the division that other ranks get."""
    text = divide(reports, SHARDED, {}).model_dump_json()
    _, layout = _another(text, 0)
    described = json.dumps([file.model_dump() for file in layout.described])
    assert [DataFile(**file) for _ in reports for file in json.loads(described)]
    return text


def _another(text: str, rank: int) -> tuple[ManifestTemplate, RankFiles]:
    """Return what a rank makes of rank 0's division."""
    shares = ManifestTemplate.model_validate_json(text)
    layout = SHARDED.lay_out(rank, shares.division.of_rank(rank), shares.tensors)
    plan_staging(layout, {tensor.key for tensor in shares.tensors})
    return shares, layout


def _opened(data: bytes, rank: int) -> None:
    """Open a checkpoint and find a rank's pieces."""
    manifest = Manifest.load(data, "here")
    places = Places(manifest, "here")
    for number, tile in manifest.divided.of_rank(rank):
        assert places.find(manifest.tensors[number].key, tile)[1]


def _report(strategy: str, rank: int, ranks: int) -> tuple[bytes, bytes]:
    own = [
        HeldTile(f"{kind}/{name}", "F32", shape, tile)
        for name, shape, tile in STRATEGIES[strategy](rank, ranks)
        for kind in KINDS
        if tile.numel
    ]
    sizes = {"torch": 5056, "python": 2509, "numpy": 2509, "cuda": 16}
    random = [
        HeldTile(random_key(rank, name), "U8", (size,), Tile(0, size))
        for name, size in sizes.items()
    ]
    return report(own, random)


def _manifest(ranks: int, shares: ManifestTemplate, layout: RankFiles) -> Manifest:
    """Return the manifest of files and checksums that do not exist."""
    (file,) = layout.described
    state = EngineState(
        aliases={}, frozen=[],
        groups=[ParameterGroup(settings={}, parameters=list(SHAPES), moments=KINDS[1:])],
        updates=dict.fromkeys(SHAPES, 1), loss_scale=None,
    )  # fmt: skip
    items = [entry.itemsize for entry in shares.tensors]
    files = []
    for rank in range(ranks):
        own = shares.division.of_rank(rank)
        size = file.data_start + sum(items[number] * tile.numel for number, tile in own)
        files.append(file.model_copy(update={"name": f"rank-{rank:05d}.data", "size": size}))
    return Manifest(
        step=1, written="", world_size=ranks, writer={}, progress={}, state=state,
        tensors=shares.tensors, division=shares.division, files=files,
        parts=[RankShare(sums=f"rank-{r:05d}.sums", digest=2**63 + r) for r in range(ranks)],
    )  # fmt: skip


def taken(work: Callable[[], T]) -> tuple[dict[str, float], T]:
    """Return processor time and peak memory of the work, and what it returns. It is done twice, as
    tracing memory takes time too."""
    began = time.process_time()
    work()
    seconds = time.process_time() - began
    tracemalloc.start()
    result = work()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"seconds": round(seconds, 2), "mb": round(peak / 1e6, 1)}, result


def main() -> None:
    """Print one line of JSON for each strategy and number of ranks, and the slowest of each."""
    slowest = []
    for ranks in map(int, sys.argv[1:] or ("1024", "4096")):
        found = []
        for strategy in STRATEGIES:
            found.append(measured(strategy, ranks))
            print(json.dumps(found[-1]), flush=True)
        slowest.append(max(found, key=lambda one: one["rank_0"]["seconds"]))
    for one in slowest:
        print(f"{one['ranks']} ranks: {one['rank_0']['seconds']} s on rank 0 ({one['strategy']})")


if __name__ == "__main__":
    main()
