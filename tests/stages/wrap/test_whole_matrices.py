"""Whole matrices are computed once, in the same bits, whatever divides them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from pipeline import DistContext, StageError
from stages.wrap import whole_matrices
from stages.wrap.whole_matrices import MatrixExchange
from tests.support.processes import run_ranks

SHAPES = [(7, 5), (4, 6), (1, 9), (3, 5, 2), (2, 3, 4, 3), (11,), (), (0, 4), (16, 16)]
"""Of matrices that ranks cannot divide evenly, of which some ranks have nothing, stacks of them,
vectors, and one without elements."""


def of_the_whole(matrix: Tensor) -> Tensor:
    """Return a matrix, each element of which depends on all, and on its place."""
    places = torch.arange(matrix.numel()).view(matrix.shape)
    return (matrix - matrix.sum() * 0.25) * (1 + places)


def expected(full: Tensor) -> Tensor:
    """Return the results of a tensor's matrices, one by one."""
    if full.ndim <= 2:
        return of_the_whole(full)
    matrices = full.view(-1, *full.shape[-2:])
    return torch.stack([of_the_whole(one) for one in matrices]).view(full.shape)


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


KINDS: dict[str, Any] = {
    "shard": ((4,), [Shard(0)]),
    "hybrid": ((2, 2), [Replicate(), Shard(0)]),
    "columns": ((2, 2), [Shard(0), Shard(-1)]),
    "copies": ((2, 2), [Shard(0), Replicate()]),
    "tensor x fsdp": ((2, 2), []),
}
"""Meshes and placements, as those of FSDP and tensor parallelism."""


def divided(tensor: Tensor, kind: str) -> nn.Parameter:
    """Return a parameter that ranks divide; one that has no dimension is not divided."""
    if kind == "plain" or tensor.ndim == 0:
        return nn.Parameter(tensor.clone())
    sizes, placements = KINDS[kind]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("shard", "tensor")[: len(sizes)])
    if placements:
        return nn.Parameter(distribute_tensor(tensor, mesh, placements))
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(tensor, mesh["tensor"], [Shard(0)]))
    fully_shard(module, mesh=mesh["shard"])
    weight: nn.Parameter = module.weight
    return weight


def exchanged(dist: DistContext, dtype: torch.dtype) -> list[str]:
    """Return what is wrong under any layout."""
    wrong = []
    for kind in ("plain", *KINDS):
        full = [values(shape, seed, dtype) for seed, shape in enumerate(SHAPES)]
        parameters = [divided(tensor, kind) for tensor in full]
        exchange, calls = MatrixExchange(), list[int]()

        def function(matrix: Tensor, calls: list[int] = calls) -> Tensor:
            calls.append(matrix.numel())
            return of_the_whole(matrix)

        for _ in range(2):  # the second time by the same plan
            found = dict(exchange(parameters, lambda parameter: parameter * 2, function))
            assert found.keys() == set(parameters)
            for parameter, tensor in zip(parameters, full, strict=True):
                result = found[parameter]
                assert isinstance(result, DTensor) == isinstance(parameter, DTensor)
                whole = result.full_tensor() if isinstance(result, DTensor) else result
                if not torch.equal(whole, expected(tensor * 2)):
                    wrong.append(f"{kind} {tuple(tensor.shape)}")
        total = torch.tensor([len(calls), sum(calls)])
        torch.distributed.all_reduce(total)
        if total[1] != 2 * sum(tensor.numel() for tensor in full):
            wrong.append(f"{kind}: {total.tolist()}, computed more than once")
    return wrong


BLOCK = [(32, 32), (8, 32), (8, 32), (32, 32), (96, 32), (96, 32), (32, 96)]


def on_four(dist: DistContext) -> tuple[list[str], int, str]:
    """Return what is wrong, with small buckets too; the cost of the matrices that this rank
    computes of six blocks; and what is said of partial sums."""
    wrong = [*exchanged(dist, torch.float32), *exchanged(dist, torch.bfloat16)]
    cost = list[int]()

    def function(matrix: Tensor) -> Tensor:
        cost.append(matrix.numel() * min(matrix.shape))
        return matrix

    parameters = [nn.Parameter(torch.ones(shape)) for shape in BLOCK * 6]
    list(MatrixExchange()(parameters, torch.clone, function))
    whole_matrices.LOCAL_ELEMENTS = 1
    wrong += exchanged(dist, torch.float32)
    mesh = init_device_mesh("cpu", (4,))
    parameter = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]))
    with pytest.raises(StageError) as error:
        list(MatrixExchange()([parameter], torch.clone, of_the_whole))
    return wrong, sum(cost), str(error.value)


def test_every_division_gives_the_bits_of_one_process() -> None:
    wrong, work, said = zip(*run_ranks(on_four, 4), strict=True)
    assert list(wrong) == [[]] * 4
    assert max(work) <= 1.05 * sum(work) / 4  # owners have about equal work
    assert said[0].startswith("a parameter is placed as Partial(sum), which")


def test_one_process_needs_no_group() -> None:
    parameter = nn.Parameter(values((5, 3), 1, torch.float32))
    ((same, result),) = MatrixExchange()([parameter], torch.clone, of_the_whole)
    assert same is parameter
    assert torch.equal(result, of_the_whole(parameter.detach()))


def test_results_of_another_size_and_parts_of_several_dtypes_are_refused() -> None:
    parameter = nn.Parameter(torch.ones(5, 3))
    with pytest.raises(StageError, match=r"shape \(5, 3\), .* made one of shape \(15, 15\)"):
        list(MatrixExchange()([parameter], torch.clone, lambda matrix: torch.ones(15, 15)))
    parameters = [nn.Parameter(torch.ones(2, 2, dtype=one)) for one in (torch.float, torch.half)]
    with pytest.raises(StageError, match="parts of whole matrices have dtypes"):
        list(MatrixExchange()(parameters, torch.clone, of_the_whole))
