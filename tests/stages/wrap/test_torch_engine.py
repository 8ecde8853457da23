"""The step of plain torch: gradients clipped by a norm of fp32, and updates counted under every
optimizer."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from pipeline import testing
from pipeline.contracts.engine import LossScale
from pipeline.contracts.objective import Scores
from pipeline.contracts.optimizer import LossScaling, OptimizerPlan, Precision
from pipeline.distributed.process_group import DistContext
from stages.objectives.cross_entropy import CrossEntropy, RowLoss, StepSums
from stages.optimizer import Lion
from stages.optimizer.adamw import AdamW
from stages.wrap.axes import Axes
from stages.wrap.optimizer_state import make_optimizers
from stages.wrap.torch_compat import multiply, step_divided
from stages.wrap.torch_engine import ModulePasses, TorchEngine, total_norm
from tests.support.batches import micro_batch
from tests.support.processes import run_ranks

FP32 = Precision(master="fp32", compute="fp32", reduce="fp32", buffer=None, loss_scaling=None)


class Plain(TorchEngine):
    """One linear layer."""

    def __init__(self, plan: OptimizerPlan, scaling: LossScaling | None = None) -> None:
        self.model = nn.Linear(3, 2, bias=False)
        passes = ModulePasses(self.model, Any, DistContext(device=torch.device("cpu")))
        optimizers = make_optimizers(plan, self.model)
        super().__init__(passes, optimizers, replace(FP32, loss_scaling=scaling), plan)

    def train(self, steps: int, *, admitted: bool = True) -> dict[str, int]:
        for _ in range(steps):
            self.model(torch.ones(3)).sum().backward()
            self.step(lr_scales=[1.0], should_step=lambda norm: admitted)
        return dict(self.state().updates)


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
    assert float(total_norm([])) == 0.0


def norms(dist: DistContext) -> list[Any]:
    """Return the norm of gradients on several meshes, and what a factor leaves of them."""
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
    # A rank without gradients takes part.
    only = [torch.tensor([3.0, 4.0])] if dist.rank == 1 else []
    return [float(norm), float(exact), left, float(total_norm(only, divided=True))]


def test_parts_on_several_meshes_count_once() -> None:
    for norm, exact, left, of_one in run_ranks(norms, 4):
        assert norm == pytest.approx(exact, rel=1e-6)
        assert (left, of_one) == (0.0, 5.0)


@pytest.mark.parametrize("stage", [AdamW(lr=0.1), Lion(lr=0.1)], ids=["adamw", "lion"])
def test_updates_are_counted_and_go_on_after_a_restore(stage: Any, tmp_path: Path) -> None:
    engine = Plain(stage.run(testing.context(tmp_path)))
    assert engine.train(0) == {"weight": 0}
    assert engine.train(3) == {"weight": 3}
    assert engine.train(2, admitted=False) == {"weight": 3}
    state, other = engine.state(), Plain(stage.run(testing.context(tmp_path)))
    assert other.train(1) == {"weight": 1}
    assert len(list(other.restore(state))) == 1
    assert other.state().updates == {"weight": 3}
    assert other.train(2) == {"weight": 5}


def test_the_loss_scale_grows_after_good_steps_and_halves_at_an_overflow(tmp_path: Path) -> None:
    """Gradients are reported and used without it."""
    scaling = LossScaling(initial_scale=4.0, growth_interval=2)
    engine, seen = Plain(AdamW().run(testing.context(tmp_path)), scaling), []
    for value in (1.0, 1.0, 1.0, math.inf, 1.0, 1.0):
        assert engine.loss_scale is not None
        before = engine.loss_scale.scale
        (before * engine.model(torch.full((3,), value)).sum()).backward()
        report = engine.step(lr_scales=[1.0])
        assert report.loss_scale == before
        assert float(report.grad_norm) == pytest.approx(value * math.sqrt(6))
        seen.append((report.applied, engine.loss_scale))
    wanted = [(4, 1), (8, 0), (8, 1), (4, 0), (4, 1), (8, 0)]
    scales = [LossScale(scale=scale, good_steps=good) for scale, good in wanted]
    assert seen == list(zip([True, True, True, False, True, True], scales, strict=True))


def trained(stage: AdamW, folder: Path, inputs: list[float]) -> tuple[Plain, list[float]]:
    """Return an engine after a step for each input, which multiplies its gradient, and the norms
    that it reported. No guard looks at them."""
    torch.manual_seed(1)
    engine, norms = Plain(stage.run(testing.context(folder))), []
    for value in inputs:
        engine.model(torch.full((3,), value)).sum().backward()
        norms.append(float(engine.step(lr_scales=[1.0]).grad_norm))
    return engine, norms


def state_of(engine: Plain) -> list[torch.Tensor]:
    """Return the weight, its moments, and the number of its updates."""
    weight = engine.model.weight
    return [weight.detach(), *engine.optimizers[0].optimizer.state[weight].values()]


INPUTS = [1.0, 30.0, 0.001, 7.0]
"""Gradients of norm 2.4, 73, 0.0024 and 17: one is below the limit."""


@pytest.mark.parametrize("kernel", ["fused", "single"])
@pytest.mark.parametrize("limit", [0.5, None])
def test_clipping_is_that_of_torch(kernel: Any, limit: float | None, tmp_path: Path) -> None:
    stage = AdamW(lr=0.1, warmup_steps=0, weight_decay=0.1, kernel=kernel, max_grad_norm=limit)
    engine, norms = trained(stage, tmp_path, INPUTS)
    torch.manual_seed(1)
    model = nn.Linear(3, 2, bias=False)
    plan = stage.run(testing.context(tmp_path))
    ((_, _, reference),) = make_optimizers(plan, model)
    for value, norm in zip(INPUTS, norms, strict=True):
        model(torch.full((3,), value)).sum().backward()
        found = torch.nn.utils.clip_grad_norm_(model.parameters(), limit or torch.inf)
        assert norm == pytest.approx(float(found), rel=1e-6)
        reference.step()
        reference.zero_grad()
    torch.testing.assert_close(engine.model.weight, model.weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("limit", [0.5, None])
def test_a_fused_update_leaves_out_what_is_not_finite_though_no_one_looks(
    bad: float, limit: float | None, tmp_path: Path
) -> None:
    stage = AdamW(lr=0.1, warmup_steps=0, weight_decay=0.1, max_grad_norm=limit)
    without, _ = trained(stage, tmp_path, INPUTS)
    engine, norms = trained(stage, tmp_path, [*INPUTS, bad])
    assert not math.isfinite(norms[-1])
    for one, other in zip(state_of(engine), state_of(without), strict=True):
        assert torch.equal(one, other)
    assert not {"grad_scale", "found_inf"} & vars(engine.optimizers[0].optimizer).keys()


class Own(torch.optim.AdamW):
    """An optimizer whose step may know nothing of what torch's own is handed."""


def test_only_the_kernels_of_torch_are_handed_the_limit() -> None:
    weights = [nn.Parameter(torch.ones(2))]
    kinds = {
        torch.optim.AdamW(weights, fused=True): True,
        torch.optim.Adam(weights, fused=True): True,
        torch.optim.AdamW(weights, foreach=False): False,
        torch.optim.SGD(weights): False,
        Own(weights, fused=True): False,
    }
    assert {one: step_divided(one, None, torch.ones(())) for one in kinds} == kinds


def three(own: Any, whole: Any, request: Any) -> Scores:
    """Score the two tokens of a micro-batch."""
    return Scores(total=torch.tensor(-3.0), tokens=torch.tensor([[-1.0, -2.0]]))


@pytest.mark.parametrize("axes", [Axes(data=2, tensor=2), Axes(data=2, context=2)])
def test_a_loss_that_a_group_computes_alike_counts_once(axes: Axes) -> None:
    parts, rows, lasts = [], [], list[bool]()
    ids = torch.zeros(1, 2, dtype=torch.int64)

    def around(last: bool) -> Any:
        lasts.append(last)
        return nullcontext()

    for rank in range(4):
        dist = DistContext(rank=rank, world_size=4, device=torch.device("cpu"))
        passes = ModulePasses(torch.nn.Linear(1, 1), three, dist, axes)
        sums = StepSums(CrossEntropy(), dist.device, {"targets": 1}, factor=1.0)
        batches = [micro_batch(ids, ids)] * 2
        found = passes.train(batches, sums, around, lambda loss: None)
        parts.append(float(found.terms["targets"]))
        rows += passes.evaluate([micro_batch(ids, ids)], RowLoss())
    assert parts == [6.0, 0.0, 6.0, 0.0]
    assert lasts == [False, True] * 4
    assert [None if one is None else one.tolist() for one in rows] == [[[3.0]], None] * 2
