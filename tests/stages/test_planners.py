"""Temporary memory of updates, as compiled code has it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from pipeline import testing
from pipeline.contracts.precision import Precision
from pipeline.planning.shapes import Topology
from stages.optimizer.adamw import AdamW, Kernel, Moments
from stages.planners import AdamWPlanner

ALLOCATED = re.compile(r"buf\d+ = empty_strided_\w+\(\(([\d, ]*)\), .*?, torch\.(\w+)\)")
HERE = Topology(ranks=1, local_ranks=1, device="cpu")
POLICY = Precision(master="fp32", compute="bf16", reduce="fp32", buffer=None, loss_scaling=None)


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_buffers_of_compiled_updates(moments: Moments, tmp_path: Path) -> None:
    from torch._inductor.utils import run_and_get_code

    weight = torch.nn.Parameter(torch.randn(1 << 16))
    weight.grad = torch.randn_like(weight)
    stage = AdamW(moments=moments)
    (part,) = stage.run(testing.context(tmp_path)).parts
    optimizer = part.build([{"params": [weight]}])
    _, (code,) = run_and_get_code(optimizer.step)
    held = [
        math.prod(map(int, re.findall(r"\d+", shape))) * getattr(torch, dtype).itemsize
        for shape, dtype in ALLOCATED.findall(code)
    ]
    told = AdamWPlanner(stage).forecast(HERE, POLICY)
    assert told.update(weight.numel()) == pytest.approx(sum(held), rel=0.01)


@pytest.mark.parametrize(("kernel", "each"), [("fused", 0), ("single", 32)])
def test_what_torchs_kernels_take(kernel: Kernel, each: int) -> None:
    """Ten elements in parameters of at most four need copies in fp32."""
    told = AdamWPlanner(AdamW(kernel=kernel)).forecast(HERE, POLICY)
    assert told.update(4) == each
