"""Names of DeepSpeed 0.19 that are private or differ between versions.

Only this file, `partitions.py` (masters) and `operators_compat.py` use them.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline import DistContext, OptimizerPart, dtype_name
from stages.wrap.zero.operators_compat import keep_operators


def point_at_device(dist: DistContext) -> None:
    """Set the device that DeepSpeed uses, and keep its operators; call before it is first
    imported."""
    # Read at import; unset, DeepSpeed guesses from what is installed.
    os.environ.setdefault("DS_ACCELERATOR", dist.device.type)
    # zero.Init reads the device index from here, also without a launcher.
    os.environ.setdefault("LOCAL_RANK", str(dist.local_rank))
    keep_operators()


def start(dist: DistContext, log: logging.Logger) -> None:
    """Make DeepSpeed use this run's device, its log, and torch's running process group."""
    point_at_device(dist)
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger

    # Its warnings go to the run's log.
    logger.handlers.clear()
    logger.parent, logger.propagate = log, True
    logger.setLevel(logging.WARNING)
    with quiet():
        deepspeed.init_distributed(
            dist_backend=get_accelerator().communication_backend_name(),
            auto_mpi_discovery=False,
            verbose=False,
        )


def whole_of(tensor: Any) -> DTensor | None:
    """The tensor on the meta device that a parameter is a tensor-parallel part of."""
    whole: DTensor | None = getattr(tensor, "part_of", None)
    return whole


def full_shape(tensor: Any) -> tuple[int, ...]:
    """The tensor's full shape, also where tensor parallelism or stage 3 has divided it."""
    whole = whole_of(tensor)
    return tuple(getattr(tensor, "ds_shape", tensor.shape) if whole is None else whole.shape)


def full_numel(parameter: Any) -> int:
    return math.prod(full_shape(parameter))


def partitioner(config: Mapping[str, Any], groups: Any) -> Callable[[nn.Parameter], None]:
    """A function that partitions a parameter among the data-parallel ranks of `groups`, or all, as
    zero.Init does. Among all, linear layers keep no gathered weight for backward from here on, as
    in its context; a layer that ranks divide is not gathered again in time."""
    import deepspeed

    with quiet():
        init = deepspeed.zero.Init(
            data_parallel_group=None if groups is None else groups.get_data_parallel_group(),
            config_dict_or_path=dict(config),
            mpu=groups,
        )
    if groups is None and init.mem_efficient_linear:
        init._enable_mem_efficient_linear()
    return lambda parameter: init._convert_to_zero_parameters([parameter])


def destroy(live: Any) -> None:
    """Free an engine, and drop the groups that it leaves to the next one of this process."""
    from deepspeed.utils import groups

    live.destroy()
    groups.mpu = None


def zero_stage(optimizer: Any) -> int:
    """The stage that a live ZeRO optimizer implements."""
    stages = {
        "DeepSpeedZeroOptimizer_Stage3": 3,
        "DeepSpeedZeroOptimizer": 2 if getattr(optimizer, "partition_gradients", False) else 1,
        "BF16_Optimizer": 1,  # for bf16 parameters with fp32 accumulation
    }
    return stages.get(type(optimizer).__name__, 0)


def master_partitions(optimizer: Any) -> list[Tensor]:
    """This rank's flat master weights, a tensor per group or sub-group; on disk they are empty."""
    for name in (
        "fp32_partitioned_groups_flat",
        "single_partition_of_fp32_groups",
        "fp32_groups_flat_partition",
    ):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return []


def offload_devices(optimizer: Any) -> tuple[str | None, str | None]:
    """Place of optimizer state and parameter shards: `cpu`, `nvme`, or None for neither."""

    def place(nvme: str, *cpu: str) -> str | None:
        on_host = any(getattr(optimizer, name, False) for name in cpu)
        return "nvme" if getattr(optimizer, nvme, False) else "cpu" if on_host else None

    return (
        place("swap_optimizer", "offload_optimizer", "cpu_offload"),
        place("params_in_nvme_and_cpu", "offload_param"),
    )


def facts(live: Any) -> dict[str, Any]:
    """The part of an engine's description that is read under DeepSpeed's names."""
    zero, apart = live.optimizer, int(live.mp_world_size)
    on_optimizer, on_parameters = offload_devices(zero)
    reduce = getattr(zero, "communication_data_type", None) or live.communication_data_type
    return {
        "zero_optimizer": type(zero).__name__,
        "optimizer": type(zero.optimizer).__name__,
        "zero_stage": zero_stage(zero),
        "world_size": torch.distributed.get_world_size(zero.dp_process_group) * apart,
        "tensor_parallel": apart,
        "device": str(live.device).partition(":")[0],
        "master": sorted({dtype_name(one.dtype) for one in master_partitions(zero)}),
        "reduce": dtype_name(reduce),
        "offload_optimizer": on_optimizer,
        "offload_param": on_parameters,
        "max_grad_norm": zero.clip_grad or None,
        "accumulation": "managed" if live.managed_gradient_accumulation() else "unmanaged",
        "loss_scaling": is_scaling(zero),
    }


def running_grad_norm(live: Any) -> float:
    """Norm of the gradients that the running step is about to apply; the engine's own norm is still
    of the step before."""
    return float(live.optimizer._global_grad_norm)


def is_scaling(zero: Any) -> bool:
    """Whether losses are scaled, by a scale that may change."""
    return bool(getattr(getattr(zero, "loss_scaler", None), "dynamic", False))


def set_loss_scale(zero: Any, scale: float) -> None:
    """Set the scale of the next backward, if there is one. Left to itself, DeepSpeed grows the
    scale before it unscales the gradients of the same step, which halves them, and ends the run at
    its least scale."""
    if is_scaling(zero):
        zero.loss_scaler.cur_scale, zero.loss_scaler.min_scale = scale, 0.0


def start_optimizer_state(
    optimizer: Any, master: Tensor, elements: int, part: OptimizerPart
) -> None:
    """Create the state that the optimizer's first step would for a flat master of `elements`."""
    device = master.device
    own_kernel = type(optimizer).__module__.startswith("deepspeed.")
    dtype = torch.float32 if getattr(optimizer, "fp32_optimizer_states", False) else master.dtype
    on_device = any(group.get("fused") for group in optimizer.param_groups)
    count = 0 if own_kernel else torch.zeros((), device=device if on_device else "cpu")
    if part.packing is None:
        moments = {n: torch.zeros(elements, dtype=dtype, device=device) for n in part.moments}
    else:
        moments = part.packing.start(master.detach(), elements)
    optimizer.state[master] = {"step": count, **moments} if part.counts_updates else moments


def quiet() -> AbstractContextManager[Any]:
    """Drop DeepSpeed's prints in the body."""
    return contextlib.redirect_stdout(io.StringIO())


def restore_bias_correction(optimizer: Any) -> None:
    """Recompute the powers of beta that DeepSpeedCPUAdam keeps outside of its saved state.

    It multiplies beta^t up in float32; after loading it would continue with pow(beta, t), which
    differs in the last bits.
    """
    kernel = getattr(optimizer, "ds_opt_adam", None)
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    if kernel is None or not steps:
        return
    group, nothing = optimizer.param_groups[0], [torch.zeros(1) for _ in range(4)]
    settings = group["lr"], *group["betas"], group["eps"], 0.0, True
    for step in range(1, int(max(steps)) + 1):
        kernel.adam_update(optimizer.opt_id, step, *settings, *nothing)
