"""optimizer.adamw: groups, and torch's arguments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.contracts.optimizer import NamedParameter
from pipeline.distributed.process_group import DistContext
from stages.optimizer.adamw import AdamW
from tests.support.optimizers import made_of
from tests.support.runs import context


@pytest.fixture
def ctx(tmp_path):  # type: ignore[no-untyped-def]
    return context(DistContext(device=torch.device("cpu")), tmp_path)


def named(*parameters: nn.Parameter) -> list[NamedParameter]:
    return [NamedParameter(str(i), p, tuple(p.shape)) for i, p in enumerate(parameters)]


def test_matrices_decay_vectors_and_frozen_do_not(ctx) -> None:  # type: ignore[no-untyped-def]
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    (part,) = AdamW(lr=0.5, weight_decay=0.1).run(ctx).parts
    groups = part.groups(named(matrix, vector, frozen))
    assert [(g["params"], g["weight_decay"]) for g in groups] == [([matrix], 0.1), ([vector], 0.0)]
    flat = NamedParameter("partitioned", vector, (4, 4))
    assert part.groups([flat])[0]["weight_decay"] == 0.1
    (everything,) = AdamW(decay_all=True, weight_decay=0.1).run(ctx).parts
    assert len(everything.groups(named(matrix, vector))) == 1


def test_one_step_is_the_rule(ctx) -> None:  # type: ignore[no-untyped-def]
    weight = nn.Parameter(torch.tensor([[2.0, -4.0]]))
    weight.grad = torch.tensor([[0.5, -1.0]])
    plan = AdamW(lr=0.1, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8).run(ctx)
    made_of(plan, named(weight)).step()
    # first step: the bias-corrected update is the gradient's sign; decay is lr * weight_decay
    assert weight.tolist()[0] == pytest.approx([2.0 * 0.99 - 0.1, -4.0 * 0.99 + 0.1], rel=1e-6)


@pytest.mark.parametrize("kernel", ["fused", "single"])
def test_every_kernel_builds_and_agrees(ctx, kernel: str) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5, 3))
    weight.grad = torch.randn(5, 3)
    expected = weight.detach().clone()
    reference = nn.Parameter(expected)
    reference.grad = weight.grad.clone()
    torch.optim.AdamW([reference], lr=0.01, weight_decay=0.01, foreach=False).step()
    plan = AdamW(lr=0.01, weight_decay=0.01, kernel=kernel).run(ctx)  # type: ignore[arg-type]
    made_of(plan, named(weight)).step()
    torch.testing.assert_close(weight, reference, rtol=0, atol=1e-7)
