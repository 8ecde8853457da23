"""Gradients are clipped by a norm that is accumulated in fp32, whatever their dtype and mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from pipeline.distributed.process_group import DistContext
from stages.wrap.gradients import multiply, total_norm
from tests.support.processes import run_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_has_the_digits_of_fp32(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    gradients = [torch.randn(301, 7, generator=draw).to(dtype) for _ in range(3)]
    exact = float(torch.cat(gradients).double().norm())
    assert float(total_norm(gradients)) == pytest.approx(exact, rel=1e-5)
    halved = [gradient.float() / 2 for gradient in gradients]
    multiply(gradients, torch.tensor(0.5))
    for gradient, wanted in zip(gradients, halved, strict=True):
        torch.testing.assert_close(gradient, wanted.to(dtype))


def test_without_a_gradient_the_norm_is_zero() -> None:
    assert float(total_norm([])) == 0.0


def norms(dist: DistContext) -> list[Any]:
    """Return the norm of gradients on two meshes, and what a factor leaves of them."""
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    draw = torch.Generator().manual_seed(0)
    cuts = [
        (meshes, [Shard(0), Shard(1)]),
        (meshes, [Shard(0), Replicate()]),
        (meshes, [Replicate(), Shard(0)]),
        (meshes["shard"], [Shard(0)]),
        (init_device_mesh("cpu", (4,)), [Shard(0)]),
    ]
    whole = [torch.randn(5, 6, generator=draw) for _ in cuts]
    gradients: list[Any] = [
        distribute_tensor(one.clone(), mesh, placements)
        for one, (mesh, placements) in zip(whole, cuts, strict=True)
    ]
    counted = [0, 1, 2, 4]
    exact = torch.cat([whole[number].flatten() for number in counted]).double().norm()
    norm = total_norm([gradients[number] for number in counted])
    multiply(gradients, torch.tensor(0.25))
    pairs = zip(gradients, whole, strict=True)
    left = max(
        float((one.full_tensor() - 0.25 * all_of_it).abs().max()) for one, all_of_it in pairs
    )
    return [float(norm), float(exact), left]


def test_parts_on_several_meshes_count_once() -> None:
    for norm, exact, left in run_ranks(norms, 4):
        assert norm == pytest.approx(exact, rel=1e-6)
        assert left == 0.0
