"""Gradients of replicas: the dtype of their average, and their place between steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.distributed.process_group import DistContext
from stages.wrap.ddp_engine import ReduceIn, reduce_in
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.state import Setting, make_engine, train

FINE = 1 + 2**-12
"""A number with more digits than bf16 has."""


def averaged(dist: DistContext, dtype: str) -> float:
    """Average a gradient of one weight that is FINE on rank 0 and 3 on rank 1."""
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


def places(dist: DistContext, folder: str) -> list[list[int]]:
    """Return the addresses of the gradients after each of three steps of several micro-batches."""
    engine = make_engine(context(dist, folder), Setting(wrap="ddp", frozen=""))
    found = []
    for step in range(3):
        train(engine, step, step + 1)
        gradients = [parameter.grad for parameter in engine.module.parameters()]
        assert all(gradient is not None and not gradient.any() for gradient in gradients)
        found.append([gradient.data_ptr() for gradient in gradients])
    engine.close()
    return found


def test_gradients_stay_in_their_buckets(tmp_path: Path) -> None:
    """Otherwise micro-batches before the last would need the memory twice."""
    for first, second, third in run_ranks(places, 2, str(tmp_path)):
        assert first == second == third
