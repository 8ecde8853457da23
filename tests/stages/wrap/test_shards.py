"""A rank's part of a sharded tensor is found in the full one, for any placement on a mesh."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from pipeline.checkpoint import Tile
from pipeline.contracts.engine import WEIGHT
from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from stages.weights.files import SafetensorsReader
from stages.wrap.optimizer_state import make_optimizers
from stages.wrap.shards import load_weights, part_of, tiles_of, weights_of
from stages.wrap.torch_engine import ModulePasses, TorchEngine
from tests.support.processes import run_ranks
from tests.support.runs import context


def full(shape: tuple[int, ...]) -> Tensor:
    numel = torch.Size(shape).numel()
    return torch.arange(1, numel + 1, dtype=torch.float32).view(shape)


def elements(part: Any, numel: int) -> list[int]:
    """Return the numbers of a tile's or fragment's elements in order."""
    run = numel // part.count
    begins = (part.start + row * part.stride for row in range(part.count))
    return [n for begin in begins for n in range(begin, begin + run)]


def require_found(name: str, tensor: Tensor, whole: Tensor) -> int:
    """Require that the tiles say where the elements here are; return the number of tiles."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    found = tiles_of(name, tensor)
    numbers = [n for tile in found for n in elements(tile, tile.numel)]
    assert whole.view(-1)[numbers].tolist() == local.reshape(-1).tolist(), (name, found)
    return len(found)


def cuts_of(shape: Sequence[int]) -> list[Placement]:
    return [Replicate(), *map(Shard, range(len(shape)))]


def placed(dist: DistContext) -> dict[str, int]:
    """Return the most tiles of a rank for every placement of every shape."""
    mesh = init_device_mesh("cpu", (2, 2))
    counts: dict[str, int] = {}
    for shape in [(4, 4), (5, 7), (1, 3), (9,), (6, 5, 4)]:
        whole, cuts = full(shape), cuts_of(shape)
        split = [_StridedShard(dim, split_factor=2) for dim in range(len(shape))]
        for placements in [*itertools.product(cuts, cuts), *((s, Shard(s.dim)) for s in split)]:
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            assert torch.equal(tensor.full_tensor(), whole), placements
            name = f"{shape} {placements}"
            counts[name] = require_found(name, tensor, whole)
    return counts


def uneven(dist: DistContext) -> int:
    """Find the parts on meshes that do not divide the sizes; return the number of tensors."""
    count = 0
    for sizes in ((2, 3), (3, 2)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("shard", "tensor"))
        for shape in [(5, 7), (13,), (5, 3, 7), (4, 2), (1, 3)]:
            whole, cuts = full(shape), cuts_of(shape)
            for placements in itertools.product(cuts, cuts):
                tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
                require_found(f"{shape} {placements}", tensor, whole)
                count += 1
            packed = [_StridedShard(0, split_factor=2)] if shape[0] % 2 == 0 else []
            for placement in [*cuts, *packed]:
                module = nn.Module()
                own = distribute_tensor(whole, mesh["tensor"], [placement], src_data_rank=None)
                module.weight = nn.Parameter(own)
                fully_shard(module, mesh=mesh["shard"])
                require_found(f"{shape} {placement}", module.weight, whole)
                count += 1
    return count


def test_meshes_that_do_not_divide() -> None:
    """Tensors that torch distributes, and those that fully_shard makes of divided layers."""
    assert set(run_ranks(uneven, 6)) == {126}


@given(
    st.lists(st.tuples(*[st.integers(1, 5)] * 3), min_size=1, max_size=4),
    st.integers(0, 99),
    st.data(),
)
def test_a_range_of_a_part_is_a_few_tiles(
    sizes: list[tuple[int, int, int]], base: int, data: st.DataObject
) -> None:
    """ZeRO cuts the flat part that tensor parallelism has left anywhere, also within rows."""
    own = [
        Tile(base, base + run, (run + gap) if count > 1 else 0, count) for run, gap, count in sizes
    ]
    numbers = [n for tile in own for n in elements(tile, tile.numel)]
    start = data.draw(st.integers(0, len(numbers)))
    stop = data.draw(st.integers(start, len(numbers)))
    found = list(part_of(own, start, stop))
    assert [n for tile in found for n in elements(tile, tile.numel)] == numbers[start:stop]
    assert len(found) <= len(own) + 4
    assert all(tile.numel for tile in found)


class Layers(nn.Module):
    """Linear layers as tensor parallelism cuts them: by rows, by columns, and not at all."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.up = nn.Linear(columns, rows, bias=False)
        self.down = nn.Linear(columns, rows, bias=False)
        self.norm = nn.Linear(columns, rows, bias=False)
        self.experts = nn.Parameter(torch.empty(3, rows, columns))


def parallel(mesh: DeviceMesh, rows: int, columns: int) -> Layers:
    """Return the layers under fully_shard over tensor parallelism, all elements zero."""
    layers = Layers(rows, columns)
    own: dict[str, Placement] = {
        "up.weight": Shard(0), "down.weight": Shard(1), "norm.weight": Replicate(),
        "experts": Shard(2),
    }  # fmt: skip
    for name, parameter in list(layers.named_parameters()):
        owner = layers.get_submodule(name.rpartition(".")[0])
        cut = distribute_tensor(torch.zeros_like(parameter), mesh["tp"], [own[name]])
        setattr(owner, name.rpartition(".")[2], nn.Parameter(cut))
    fully_shard(layers, mesh=mesh["shard"])
    return layers


SIZES = [(8, 8), (7, 5), (3, 10)]


def loaded(dist: DistContext, folder: str) -> list[int]:
    """Load and change the layers of each size; return the bytes read beyond those held."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    ctx, beyond = context(dist, folder), []
    for rows, columns in SIZES:
        layers = parallel(mesh, rows, columns)
        reader = SafetensorsReader([Path(folder) / f"{rows}x{columns}.safetensors"])
        load_weights(weights_of(layers), reader, ctx)
        read = reader.bytes_read
        for name, parameter in layers.named_parameters():
            whole = reader.read(name)
            assert torch.equal(parameter.full_tensor(), whole), name  # type: ignore[attr-defined]
            require_found(name, parameter, whole)
        own = sum(parameter.to_local().nbytes for parameter in layers.parameters())  # type: ignore[attr-defined]
        beyond.append(read - own)
        require_fragments(layers, ctx, reader)
        reader.close()
    return beyond


def require_fragments(layers: Layers, ctx: Any, reader: SafetensorsReader) -> None:
    """Require that fragments are the weights' elements, and live, with their moments."""
    plan = AdamW().run(ctx)
    precision = PrecisionPolicy(compute="fp32").run(ctx)
    passes: Any = ModulePasses(layers, Any, ctx.dist)
    engine = TorchEngine(passes, make_optimizers(plan, layers), precision, plan)
    for fragment in engine.fragments():
        numbers = elements(fragment, fragment.state[WEIGHT].numel())
        whole = reader.read(fragment.name).view(-1)[numbers]
        assert torch.equal(fragment.state[WEIGHT], whole)
        assert fragment.stop == fragment.start + len(numbers) // fragment.count
        for tensor in fragment.state.values():
            tensor.copy_(whole + 1)
    for name, parameter in layers.named_parameters():
        state = engine.optimizers[0].optimizer.state[parameter]
        for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"]):
            assert torch.equal(tensor.full_tensor(), reader.read(name) + 1)


def refused(dist: DistContext) -> list[str]:
    mesh, told = init_device_mesh("cpu", (2, 2)), []
    partial = DTensor.from_local(torch.zeros(2), mesh, [Replicate(), Partial()], run_check=False)
    scattered = DTensor.from_local(
        torch.zeros(2000, 2), mesh, [Replicate(), _StridedShard(1, split_factor=2)],
        run_check=False, shape=torch.Size((2000, 4)), stride=(4, 1),
    )  # fmt: skip
    for tensor in (partial, scattered):
        with pytest.raises(StageError) as error:
            tiles_of("a", tensor)
        told.append(str(error.value))
    return told


def everything(dist: DistContext, folder: str) -> tuple[dict[str, int], list[int], list[str]]:
    """Return the results of all three, from one start of the ranks."""
    return placed(dist), loaded(dist, folder), refused(dist)


def test_placements_on_two_axes(tmp_path: Path) -> None:
    """Of any tensor, of weights under tensor parallelism and fully_shard, which are loaded, and of
    what has no regular place."""
    for rows, columns in SIZES:
        state = {name: full(tuple(p.shape)) for name, p in Layers(rows, columns).named_parameters()}
        save_file(state, tmp_path / f"{rows}x{columns}.safetensors")
    for counts, beyond, (partial, scattered) in run_ranks(everything, 4, str(tmp_path), limit=900):
        assert counts["(5, 7) (Shard(dim=1), Shard(dim=0))"] == 1
        assert counts["(6, 5, 4) (Shard(dim=2), Shard(dim=0))"] == 1
        assert counts["(6, 5, 4) (Shard(dim=2), Shard(dim=1))"] == 6
        assert max(counts.values()) <= 6
        assert beyond == [0] * len(SIZES)
        assert "a is placed as Partial(sum), which cannot be saved" in partial
        assert "more than 1024 places, which cannot be saved" in scattered
