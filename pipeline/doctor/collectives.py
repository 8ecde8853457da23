"""All-reduce and all-gather among the processes of this machine, through the backend that a run
would use: gloo, or NCCL between GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.doctor.probes import seconds_each
from pipeline.doctor.report import Collective

if TYPE_CHECKING:
    import torch


ITEM = 4
"""Bytes of an fp32 element."""


def measure(settings: Mapping[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Rank 0 tells operation, bytes and seconds of each of `sizes` (bytes, ascending).

    `budget` is the seconds that one of them should take; the larger ones that would need far more
    are left out.
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
                tell({"operation": name, "bytes": real, "seconds": seconds})
        if worst > 4 * settings["budget"]:
            break
    dist.destroy_process_group()


def _operations(
    size: int, procs: int, device: torch.device
) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Name, bytes that it is really about, and the operation."""
    import torch
    import torch.distributed as dist

    share = max(size // ITEM // procs, 1)
    whole = torch.zeros(share * procs, device=device)
    yield "allreduce", whole.numel() * ITEM, lambda: dist.all_reduce(whole)
    own = torch.ones(share, device=device)
    yield "allgather", whole.numel() * ITEM, lambda: dist.all_gather_into_tensor(whole, own)


def _slowest(seconds: float, *, device: torch.device) -> float:
    """The longest of all ranks' times, on all ranks, which leave this together."""
    import torch
    import torch.distributed as dist

    longest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


def allreduce(size: int, seconds: float, procs: int) -> Collective:
    """Every byte crosses a link 2 (n - 1) / n times: reduced on one, then told to all."""
    return _collective(size, seconds, 2 * (procs - 1) / procs)


def allgather(size: int, seconds: float, procs: int) -> Collective:
    """All but a process's own share comes to it: (n - 1) / n of the whole, `size` bytes."""
    return _collective(size, seconds, (procs - 1) / procs)


def _collective(size: int, seconds: float, crossings: float) -> Collective:
    rate = size / seconds
    return Collective(bytes=size, seconds=seconds, algbw=rate, busbw=rate * crossings)
