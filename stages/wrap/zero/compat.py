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
from torch import Tensor, nn

from pipeline import DistContext, OptimizerPart
from stages.wrap.tensor.placements import whole_of
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


def full_shape(tensor: Any) -> tuple[int, ...]:
    """The tensor's full shape, also where tensor parallelism or stage 3 has divided it."""
    whole = whole_of(tensor)
    return tuple(getattr(tensor, "ds_shape", tensor.shape) if whole is None else whole.shape)


def full_numel(parameter: Any) -> int:
    """Elements of the whole parameter, also where it is divided."""
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


def forget_groups() -> None:
    """Drop the groups that an engine has left to the next one of this process."""
    from deepspeed.utils import groups

    groups.mpu = None


def zero_stage(optimizer: Any) -> int:
    """The stage that a live ZeRO optimizer implements."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return 3
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return 2 if optimizer.partition_gradients else 1
    # DeepSpeed's stage 1 for bf16 parameters with fp32 accumulation.
    return 1 if isinstance(optimizer, BF16_Optimizer) else 0


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


def reduce_dtype(engine: Any) -> torch.dtype:
    """Dtype in which gradients travel between ranks."""
    own: torch.dtype | None = getattr(engine.optimizer, "communication_data_type", None)
    dtype: torch.dtype = engine.communication_data_type
    return own or dtype


def global_grad_norm(engine: Any) -> float:
    """Norm of the gradients that the running step is about to apply; the engine's own norm is still
    that of the step before."""
    return float(engine.optimizer._global_grad_norm)


def model_parallel_ranks(engine: Any) -> int:
    """Number of ranks that each have a part of the layers."""
    return int(engine.mp_world_size)


def loss_scaler(engine: Any) -> Any | None:
    """The live dynamic loss scaler; None without loss scaling."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return scaler if scaler is not None and scaler.dynamic else None


def lift_loss_scale_floor(engine: Any) -> None:
    """Let the loss scale fall without limit, as torch's does; DeepSpeed ends the run at its floor,
    and refuses a configuration without one."""
    if (scaler := loss_scaler(engine)) is not None:
        scaler.min_scale = 0.0


def steps_since_overflow(scaler: Any) -> int:
    """Steps applied since the last overflow, or since the start."""
    return int(scaler.cur_iter - scaler.last_overflow_iter - 1)


def set_loss_scale(scaler: Any, scale: float, good_steps: int) -> None:
    """Restore dynamic loss scaling to `good_steps` after the last change of the scale."""
    scaler.cur_scale = scale
    scaler.cur_iter = scaler.last_overflow_iter + 1 + good_steps


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


def is_swapped(shard: Any) -> bool:
    """Whether a parameter's shard is on disk only."""
    return str(getattr(shard, "status", "")).endswith("NOT_AVAILABLE")


def quiet() -> AbstractContextManager[Any]:
    """Drop DeepSpeed's prints in the body."""
    return contextlib.redirect_stdout(io.StringIO())


def restore_bias_correction(engine: Any) -> None:
    """Recompute the powers of beta that DeepSpeedCPUAdam keeps outside of its saved state.

    It multiplies beta^t up in float32; after loading it would go on with pow(beta, t), which
    differs in the last bits.
    """
    optimizer = engine.optimizer.optimizer
    kernel = getattr(optimizer, "ds_opt_adam", None)
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    if kernel is None or not steps:
        return
    group = optimizer.param_groups[0]
    nothing = [torch.zeros(1) for _ in range(4)]
    for step in range(1, int(max(steps)) + 1):
        kernel.adam_update(
            optimizer.opt_id, step, group["lr"], *group["betas"], group["eps"], 0.0, True, *nothing
        )
