"""The number of a parameter's updates is known under every optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline import testing
from pipeline.contracts.optimizer import OptimizerPlan
from stages.optimizer.adamw import AdamW
from stages.optimizer.lion import Lion
from stages.wrap.optimizer_groups import make_optimizer
from stages.wrap.torch_engine import TorchEngine


class Plain(TorchEngine):
    """One linear layer."""

    scaler = None

    def __init__(self, plan: OptimizerPlan) -> None:
        self.model = nn.Linear(3, 2, bias=False)
        self.plan = plan
        self.optimizer = make_optimizer(plan, self.model)

    @property
    def module(self) -> nn.Module:
        return self.model

    def describe(self) -> Mapping[str, Any]:
        return {}

    def train(self, steps: int, *, admitted: bool = True) -> dict[str, int]:
        for _ in range(steps):
            self.model(torch.ones(3)).sum().backward()
            self.step(lr_scale=1.0, should_step=lambda norm: admitted)
        return dict(self.state().updates)


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
