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


def summed(step: Done, ranks: int) -> Sums:
    """A step's numbers over all ranks (collective)."""
    taken = step.taken
    sums = torch.tensor(
        [0.0, float(taken.tokens), float(taken.squares), taken.seconds],
        dtype=torch.float64,
        device=step.loss.device,
    )
    sums[0] = step.loss
    if ranks > 1:
        torch.distributed.all_reduce(sums)
    return Sums(*sums.tolist())


def peak_memory(device: torch.device, ranks: int) -> dict[str, int]:
    """Most bytes that were taken at once on one rank since the start (collective), as far as they
    are known: by torch's tensors on its GPU, by the model and its training of its host memory.
    `pipeline.resident` says what is counted there."""
    on_gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    most = torch.tensor([on_gpu, resident.peak_beyond() or 0], device=device)
    if ranks > 1:
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    names = ("peak_memory_bytes", "peak_host_memory_bytes")
    return {name: int(size) for name, size in zip(names, most.tolist(), strict=True) if size}


def mean_of(records: Sequence[Mapping[str, Any]], name: str) -> float:
    """Of a number per step, over the time of all of them."""
    seconds = sum(record["step_seconds"] for record in records)
    return float(sum(record[name] * record["step_seconds"] for record in records) / seconds)
