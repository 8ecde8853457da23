"""Nested blocks of the stage's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

OffloadDevice = Literal["cpu", "nvme"]


@dataclass(frozen=True, kw_only=True)
class OptimizerOffload:
    """Keep optimizer state and master weights off the accelerator, and step on the host."""

    device: OffloadDevice = "cpu"
    """Host memory, or files on an NVMe disk (stage 3 only)."""

    path: str | None = None
    """With nvme: folder on the disk, local to each node."""

    pin_memory: bool = True
    """Use page-locked host memory, which copies faster."""

    buffer_count: Annotated[int, Ge(0)] = 4
    """With nvme: buffers in the pool; at least the tensors kept per parameter (Adam has four:
    parameter, gradient and two moments)."""

    fast_init: bool = False
    """With nvme parameters too: initialise master weights straight from the swapped parameters."""

    pipeline_read: bool = False
    """With nvme: read the next tile while the current one is updated."""

    pipeline_write: bool = False
    """With nvme: write the previous tile while the current one is updated."""

    ratio: Annotated[float, Ge(0), Le(1)] = 1.0
    """Share of the optimizer's sub-groups that is offloaded; below 1 at stage 3 with cpu only."""


@dataclass(frozen=True, kw_only=True)
class ParameterOffload:
    """Keep parameter shards off the accelerator between uses (stage 3 only)."""

    device: OffloadDevice = "cpu"
    """Host memory, or files on an NVMe disk."""

    path: str | None = None
    """With nvme: folder on the disk, local to each node."""

    pin_memory: bool = True
    """Use page-locked host memory, which copies faster."""

    buffer_count: Annotated[int, Ge(0)] = 5
    """With nvme: buffers in the pool."""

    buffer_size: Annotated[int, Gt(0)] = 100_000_000
    """With nvme: elements of one buffer; no less than the largest parameter."""

    max_in_cpu: Annotated[int, Ge(0)] = 1_000_000_000
    """With nvme: parameter elements that may stay in host memory."""


@dataclass(frozen=True, kw_only=True)
class Aio:
    """Asynchronous disk access of NVMe offload (libaio)."""

    block_size: Annotated[int, Gt(0)] = 1_048_576
    """Bytes of one request; sub-groups smaller than this stay in host memory."""

    queue_depth: Annotated[int, Gt(0)] = 8
    """Requests in flight per thread."""

    intra_op_parallelism: Annotated[int, Gt(0)] = 1
    """Threads that share one read or write."""

    single_submit: bool = False
    """Submit requests one at a time instead of in batches."""

    overlap_events: bool = True
    """Submit further requests while waiting for finished ones."""

    use_gds: bool = False
    """Move data between disk and GPU directly (GPUDirect Storage)."""
