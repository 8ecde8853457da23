"""What updates take for a moment, as compiled code says and as a trace sees it."""

from __future__ import annotations

import functools
import math
import re

import pytest
import torch

from pipeline.artifacts import Precision
from pipeline.planning.topology import Topology
from stages.optimizer.adamw import AdamW, Moments
from stages.optimizer.lowbit import LowBitAdamW
from stages.optimizer.packings import packing
from stages.optimizer.planner import AdamWPlanner

ALLOCATED = re.compile(r"(buf\d+) = empty_strided_\w+\(\(([\d, ]*)\), .*?, torch\.(\w+)\)")
ELEMENTS = 1 << 16
HERE = Topology(ranks=1, local_ranks=1, device="cpu")
POLICY = Precision(master="fp32", compute="bf16", reduce="fp32", buffer=None, loss_scaling=None)


def compiled(moments: Moments) -> str:
    """The code that an update is compiled to."""
    from torch._inductor.utils import run_and_get_code

    weight = torch.nn.Parameter(torch.randn(ELEMENTS))
    weight.grad = torch.randn(ELEMENTS)
    build = functools.partial(
        LowBitAdamW, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, rounding_seed=None
    )
    optimizer = build([{"params": [weight]}], packing=packing(moments), compiled=True)
    _, (code,) = run_and_get_code(optimizer.step)
    return str(code)


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_buffers_of_compiled_updates(moments: Moments) -> None:
    held = [
        math.prod(int(size) for size in shape.split(",") if size.strip())
        * torch.empty(0, dtype=getattr(torch, dtype)).element_size()
        for _, shape, dtype in ALLOCATED.findall(compiled(moments))
    ]
    told = AdamWPlanner(AdamW(moments=moments)).forecast(HERE, POLICY)
    assert told.update(ELEMENTS, ELEMENTS) == pytest.approx(sum(held), rel=0.01)


@pytest.mark.parametrize(("kernel", "each"), [("fused", 0), ("foreach", 40), ("single", 32)])
def test_what_torchs_kernels_take(kernel: str, each: int) -> None:
    """Of ten elements in parameters of at most four: copies in fp32."""
    told = AdamWPlanner(AdamW(kernel=kernel)).forecast(HERE, POLICY)  # type: ignore[arg-type]
    assert told.update(4, 10) == each
