"""A checkpoint of an adapter, exported without the run that says what it is for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.errors import StageError
from stages.export import plan
from stages.weights.torch_files import MemoryReader


def test_an_adapter_without_its_run_is_called_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "ties", lambda model: {})
    names = ("base.lora_A.default.weight", "base.lora_B.default.weight")
    weights: Any = MemoryReader({name: torch.zeros(2, 2) for name in names})
    outline = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(StageError, match=r"holds an adapter.*export the run that saved it"):
        plan.names_to_read(outline, weights)
