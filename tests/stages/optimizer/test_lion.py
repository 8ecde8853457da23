"""optimizer.lion: the published rule, and the same numbers as bitsandbytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pipeline import testing
from pipeline.contracts.optimizer import NamedParameter
from stages.optimizer.lion import Lion
from tests.support.optimizers import made_of


def built(parameter: nn.Parameter, tmp_path: Path, **fields: float) -> torch.optim.Optimizer:
    plan = Lion(**fields).run(testing.context(tmp_path))  # type: ignore[arg-type]
    return made_of(plan, [NamedParameter("w", parameter, tuple(parameter.shape))])


def test_two_steps_by_hand(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.tensor([[1.0, -2.0]]))
    optimizer = built(weight, tmp_path, lr=0.1, weight_decay=0.5)
    weight.grad = torch.tensor([[3.0, -1.0]])
    optimizer.step()
    # sign(0.1 g), after a decay of lr * weight_decay; the moment is 0.01 g
    assert weight.tolist()[0] == pytest.approx([1 * 0.95 - 0.1, -2 * 0.95 + 0.1])
    assert optimizer.state[weight]["exp_avg"].tolist()[0] == pytest.approx([0.03, -0.01])
    before = weight.tolist()[0]
    weight.grad = torch.tensor([[-0.2, 0.5]])
    optimizer.step()
    # 0.9 x 0.03 - 0.1 x 0.2 > 0, 0.9 x -0.01 + 0.1 x 0.5 > 0
    assert weight.tolist()[0] == pytest.approx([before[0] * 0.95 - 0.1, before[1] * 0.95 - 0.1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_moment_has_the_dtype_of_the_weight(dtype: torch.dtype, tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(3, 2, dtype=dtype))
    optimizer = built(weight, tmp_path)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].dtype is dtype


def test_the_numbers_are_those_of_bitsandbytes(tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    own = nn.Parameter(torch.randn(64, 80))
    other = nn.Parameter(own.detach().clone())
    ours = built(own, tmp_path, lr=1e-3, weight_decay=0.1)
    theirs = bitsandbytes.optim.Lion([other], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(5):
        own.grad = torch.randn(64, 80)
        other.grad = own.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(own, other, rtol=0, atol=1e-6)
