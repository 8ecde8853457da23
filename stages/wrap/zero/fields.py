"""Fields of `wrap.zero`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from stages.wrap.axes import ContextParallel, TensorParallel

Elements = Annotated[int, Gt(0)]


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Where something is kept off the accelerator."""

    device: Literal["cpu", "nvme"] = "cpu"
    """Host memory, or files on an NVMe disk (stage 3 only)."""

    path: str | None = None
    """With nvme: folder on the disk, local to each node."""

    pin_memory: bool = True
    """Use page-locked host memory, which copies faster."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOffload(Offload):
    """Keep optimizer state and master weights off the accelerator, and step on the host."""

    buffer_count: Annotated[int, Ge(0)] = 4
    """With nvme: buffers in the pool; at least the tensors kept per parameter (Adam has four:
    parameter, gradient and two moments)."""

    pipeline_read: bool = False
    """With nvme: read the next tile while the current one is updated."""

    pipeline_write: bool = False
    """With nvme: write the previous tile while the current one is updated."""


@dataclass(frozen=True, kw_only=True)
class ParameterOffload(Offload):
    """Keep parameter shards off the accelerator between uses (stage 3 only)."""

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


@dataclass(frozen=True, kw_only=True)
class PlusPlus:
    """Send less between nodes (Wang et al. 2023, ZeRO++). Stage 3 only.

    Quantized values are sent by CUDA kernels of DeepSpeed; masters and checkpoints stay exact.
    """

    secondary_partition: Annotated[int, Ge(2)] | None = None
    """Ranks, usually a node's, that share a second copy of the parameters in the compute
    dtype: backward gathers from it (hpZ). Null keeps none."""

    quantized_weights: bool = False
    """Gather parameters in 8 bits (qwZ); the precision slot has compute: bf16 or fp16."""

    quantized_gradients: bool = False
    """Reduce gradients in 4 bits, within nodes and then between them (qgZ); each node runs a
    process for each of its GPUs, and the precision slot has reduce: fp16. On one node nothing is
    quantized."""


@dataclass(frozen=True, kw_only=True)
class ZeroFields:
    """See `wrap.zero`."""

    stage: Literal[1, 2, 3] = 2
    """1 shards optimizer state, 2 gradients too, 3 parameters too."""

    offload_optimizer: OptimizerOffload | None = None
    """Offload optimizer state and the optimizer step; null keeps both on the accelerator."""

    offload_param: ParameterOffload | None = None
    """Stage 3: offload parameter shards; null keeps them on the accelerator."""

    optimizer_implementation: Literal["auto", "torch"] = "auto"
    """With offload_optimizer: torch takes the optimizer stage's torch class, auto DeepSpeed's CPU
    Adam if the optimizer stage asks for AdamW with plain moments. It is compiled at first use,
    which takes about a minute."""

    reduce_bucket_size: Elements = 500_000_000
    """Gradient elements reduced at a time. Their buffer is allocated whole for any model; stage 1
    with bf16 and without offload has none."""

    allgather_bucket_size: Elements = 500_000_000
    """Stages 1 and 2: parameter elements gathered at a time after a step."""

    overlap_comm: bool | None = None
    """Reduce gradients while backward computes (stages 2 and 3); null means only at stage 3. At
    stage 2 it takes a second bucket, and `reduce_bucket_size` must hold the largest gradient."""

    contiguous_gradients: bool = True
    """Copy gradients into one buffer as they come, which avoids fragmentation."""

    round_robin_gradients: bool | None = None
    """Stages 1 and 2: spread each gradient over ranks finely, for parallel copies to the host."""

    prefetch_bucket_size: Annotated[int, Ge(0)] | None = None
    """Stage 3: parameter elements to gather ahead of use."""

    param_persistence_threshold: Annotated[int, Ge(0)] | None = None
    """Stage 3: parameters with fewer elements stay gathered."""

    max_live_parameters: Annotated[int, Ge(0)] | None = None
    """Stage 3: parameter elements that may be gathered at once."""

    max_reuse_distance: Annotated[int, Ge(0)] | None = None
    """Stage 3: keep a parameter gathered if it is used again within this number of elements."""

    sub_group_size: Elements | None = None
    """Stage 3: elements that the optimizer updates (and swaps) at a time."""

    plus_plus: PlusPlus | None = None
    """Stage 3: less traffic between nodes; null sends everything as it is."""

    aio: Aio | None = None
    """Disk access settings of NVMe offload."""

    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further DeepSpeed configuration under DeepSpeed's own keys (nested blocks too). A key that a
    field above or another slot decides, or that DeepSpeed does not know, is refused."""

    context_parallel: ContextParallel | None = None
    """Divide the tokens of every sample among ranks; null keeps each sample on one rank."""

    tensor_parallel: TensorParallel | None = None
    """Divide every layer among neighbouring ranks; null puts whole layers on each rank."""


RULE = "adamw"
"""Name in an OptimizerPlan of the update rule that DeepSpeed's CPU Adam computes."""


def uses_cpu_adam(stage: ZeroFields, algorithm: str) -> bool:
    """Whether DeepSpeed's CPU Adam updates the weights, instead of the optimizer stage's class."""
    auto = stage.optimizer_implementation == "auto"
    return auto and stage.offload_optimizer is not None and algorithm == RULE
