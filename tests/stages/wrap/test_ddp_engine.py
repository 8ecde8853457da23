"""Gradients of replicas: the dtype of their average, and their place."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.contracts.data import MicroBatch
from pipeline.distributed.process_group import DistContext
from stages.wrap.ddp_engine import BucketSums, ReduceIn, reduce_in
from stages.wrap.torch_compat import prime_buckets
from tests.support.batches import accumulated
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.state import Setting, make_engine
from tests.support.zero import share

M_MMAP_THRESHOLD = -3
"""Of malloc.h."""
FINE = 1 + 2**-12
"""A number with more digits than bf16 has."""


def looked_at(dist: DistContext, folder: str) -> tuple[list[float], list[list[int]]]:
    """Return the means of a gradient of one weight that is FINE on rank 0 and 3 on rank 1, in fp32
    and in bf16; and the addresses of gradients within steps of three micro-batches and at their
    ends, with a step of a single one in between."""
    means, found = [], list[list[int]]()
    for dtype in (torch.float32, torch.bfloat16):
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        model.register_comm_hook(ReduceIn(dtype, model.process_group), reduce_in)
        model(torch.full((1, 1), 3.0 if dist.rank else FINE)).sum().backward()
        gradient = model.module.weight.grad
        assert gradient.dtype == torch.float32
        means.append(float(gradient))
    engine = make_engine(context(dist, folder), Setting(wrap="ddp", frozen=""))

    def look() -> None:
        gradients = [parameter.grad for parameter in engine.parts[0].parameters()]
        found.append([gradient.data_ptr() for gradient in gradients if gradient is not None])

    def watched(batches: list[MicroBatch]) -> Iterator[MicroBatch]:
        for number, batch in enumerate(batches):
            if number == 2:  # the first has run, as one is taken ahead
                look()
            yield batch

    for step, count in enumerate((3, 3, 1, 3)):
        batches, targets = share(engine, step, 36)
        accumulated(engine, watched(list(batches)[:count]), targets)
        look()
        engine.step(lr_scales=[1.0])
        assert all(parameter.grad is None for parameter in engine.parts[0].parameters())
    engine.close()
    return means, found


def test_gradients_are_averaged_in_their_dtype_and_add_up_in_their_buckets(tmp_path: Path) -> None:
    """Otherwise micro-batches before the last would need the memory twice; so would the first step,
    if its gradients were in the buckets that torch lays out before it knows their order."""
    for means, (first, *later) in run_ranks(looked_at, 2, str(tmp_path)):
        assert means == [(FINE + 3) / 2, 2.0]
        assert len(later) == 6
        assert all(one == first for one in later)


def resident(dist: DistContext, views: bool) -> float:
    """Return the resident memory after a step of two micro-batches, at most, in copies of all
    gradients, next to the weights."""
    # Memory that is freed goes back to the system at once.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    process = psutil.Process()
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(12)])
    size = sum(4 * one.numel() for one in model.parameters())
    before = process.memory_info().rss
    replica = DistributedDataParallel(
        model, gradient_as_bucket_view=views, bucket_cap_mb=4, init_sync=False
    )
    prime_buckets(replica)
    peaks, sums = [], BucketSums()
    for last in (False, True):
        sums.remember(replica)
        sums.begin(last=last)
        with nullcontext() if last else replica.no_sync():
            replica(torch.ones(1, 1024)).sum().backward()
        peaks.append((process.memory_info().rss - before) / size)
    return max(peaks)


@pytest.mark.parametrize(("views", "copies"), [(True, 1), (False, 2)])
def test_no_more_copies_of_the_gradients_than_planned(views: bool, copies: int) -> None:
    for most in run_ranks(resident, 2, views):
        assert copies - 0.3 < most < copies + 0.6
