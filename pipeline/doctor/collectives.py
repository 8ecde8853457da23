"""Measure all-reduce and all-gather through the backend of a run: gloo, or NCCL between GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.doctor.report import Collective
from pipeline.doctor.timing import Record, seconds_each

if TYPE_CHECKING:
    import torch

ITEM = 4
"""Bytes of an fp32 element."""
CROSSINGS = {"allreduce": 2, "allgather": 1}
"""Times that all data but a process's own share crosses the busiest link."""


def bandwidth(operation: str, size: int, seconds: float, procs: int) -> Collective:
    """The result of an operation on `size` bytes, with nccl-tests' definitions: the bus bandwidth
    is 2 (n - 1) / n times the algorithm bandwidth in an all-reduce, (n - 1) / n in an all-gather.
    """
    rate = size / seconds
    busbw = rate * CROSSINGS[operation] * (procs - 1) / procs
    return Collective(bytes=size, seconds=seconds, algbw=rate, busbw=busbw)


def measure(settings: Mapping[str, Any], record: Record) -> None:
    """Record operation, bytes and seconds on rank 0, for each of `sizes` (bytes, ascending).

    `budget` is the seconds for one operation; sizes that would need far more are skipped.
    """
    import torch.distributed as dist

    from pipeline.distributed.process_group import environment_dist

    procs = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(settings["store"], procs)  # type: ignore[attr-defined]
    here = environment_dist(store, device=settings["device"])
    timed = partial(
        seconds_each,
        device=settings["device"],
        budget=settings["budget"],
        agree=partial(_slowest, device=here.device),
    )
    for size in settings["sizes"]:
        worst = 0.0
        for name, real, action in _operations(size, procs, here.device):
            seconds = timed(action)
            worst = max(worst, seconds)
            if here.is_main:
                record({"operation": name, "bytes": real, "seconds": seconds})
        if worst > 4 * settings["budget"]:
            break
    dist.destroy_process_group()


def _operations(
    size: int, procs: int, device: torch.device
) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Name, bytes (`size` rounded to whole shares) and call of each operation."""
    import torch
    import torch.distributed as dist

    share = max(size // ITEM // procs, 1)
    whole = torch.zeros(share * procs, device=device)
    yield "allreduce", whole.numel() * ITEM, lambda: dist.all_reduce(whole)
    own = torch.ones(share, device=device)
    yield "allgather", whole.numel() * ITEM, lambda: dist.all_gather_into_tensor(whole, own)


def _slowest(seconds: float, *, device: torch.device) -> float:
    """The longest time of all ranks; they return from this together (collective)."""
    import torch
    import torch.distributed as dist

    longest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)
