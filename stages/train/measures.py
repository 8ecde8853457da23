"""What ranks have measured, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed

from pipeline import resident
from stages.train.step import Done


class Sums(NamedTuple):
    """Of one step over all ranks."""

    loss: float
    """Mean over target tokens, in nats."""
    tokens: float
    """Without padding."""
    squares: float
    """Squared lengths of samples."""
    waited: float
    """Seconds that ranks waited for data."""


def summed(steps: Sequence[Done], ranks: int) -> list[Sums]:
    """The steps' numbers over all ranks (collective)."""
    losses = torch.stack([done.loss for done in steps]).to(torch.float64)
    taken = [[float(d.taken.tokens), float(d.taken.squares), d.taken.seconds] for d in steps]
    rest = torch.tensor(taken, dtype=torch.float64, device=losses.device)
    sums = torch.cat([losses[:, None], rest], dim=1)
    if ranks > 1:
        torch.distributed.all_reduce(sums)
    return [Sums(*row) for row in sums.tolist()]


def peak_memory(device: torch.device, ranks: int) -> int | None:
    """Most bytes that torch's tensors took at once on one rank's GPU since the start (collective);
    None without GPUs."""
    if device.type != "cuda":
        return None
    most = torch.tensor(torch.cuda.max_memory_allocated(device), device=device)
    if ranks > 1:
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return int(most)


def peak_host_memory(device: torch.device, ranks: int) -> int | None:
    """Most bytes that the model and its training took at once of one rank's host memory since the
    start (collective); None where that is not known. `pipeline.resident` says what is counted."""
    most = torch.tensor(resident.peak_beyond() or 0, device=device)
    if ranks > 1:
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return int(most) or None


def mean_of(records: Sequence[Mapping[str, Any]], name: str) -> float:
    """Of a number per step, over the time of all of them."""
    seconds = sum(record["step_seconds"] for record in records)
    return float(sum(record[name] * record["step_seconds"] for record in records) / seconds)
