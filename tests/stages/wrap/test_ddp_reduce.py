"""Gradients of replicas are averaged in the dtype that the precision policy says."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.dist import Dist
from stages.wrap.ddp_reduce import ReduceIn, reduce_in
from tests.support.processes import run_ranks

FINE = 1 + 2**-12
"""More digits than bf16 has."""


def averaged(dist: Dist, dtype: str) -> float:
    """The gradient of one weight, FINE on rank 0 and 3 on rank 1."""
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    state = ReduceIn(getattr(torch, dtype), model.process_group)
    model.register_comm_hook(state, reduce_in)
    model(torch.full((1, 1), 3.0 if dist.rank else FINE)).sum().backward()
    gradient = model.module.weight.grad
    assert gradient.dtype == torch.float32
    return float(gradient)


@pytest.mark.parametrize(("dtype", "mean"), [("float32", (FINE + 3) / 2), ("bfloat16", 2.0)])
def test_the_mean_has_the_digits_of_its_dtype(dtype: str, mean: float) -> None:
    assert run_ranks(averaged, 2, dtype) == [mean, mean]
