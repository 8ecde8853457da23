"""The DeepSpeed configuration that follows from a recipe. Pure functions."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline.contracts.precision import LossScaling, Precision

if TYPE_CHECKING:
    from stages.wrap.zero.stage import OptimizerOffload, ParameterOffload, Zero

NEVER = 2**62
"""A loss scale window that never ends: the engine grows the scale itself, see `engine.py`."""

STAGE_3_FIELDS = {
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "sub_group_size": "sub_group_size",
}
"""Fields that mean something at stage 3 only -> DeepSpeed's name."""


def generate(stage: Zero, precision: Precision, *, max_grad_norm: float | None) -> dict[str, Any]:
    """The whole configuration, JSON; `stage.extra` merged in (already checked for collisions)."""
    return merge(decided(stage, precision, max_grad_norm=max_grad_norm), stage.extra)


def decided(stage: Zero, precision: Precision, *, max_grad_norm: float | None) -> dict[str, Any]:
    """The keys that fields of the recipe decide."""
    config: dict[str, Any] = {
        # The loop owns batches: it normalises the loss and calls step once per accumulation.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_allreduce_op": "mean",
        "gradient_clipping": max_grad_norm or 0.0,
        "communication_data_type": precision.reduce,
        # Buffers are cast by us, to exactly what the precision policy says.
        "data_types": {"grad_accum_dtype": "fp32", "keep_in_fp32_modules": []},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero_block(stage),
    }
    if precision.compute == "bf16":
        config["bf16"] = {"enabled": True, **_bf16_master(stage, precision)}
    if precision.loss_scaling is not None:
        config["fp16"] = _fp16_block(precision.loss_scaling)
    if stage.aio is not None:
        config["aio"] = asdict(stage.aio)
    return config


def _bf16_master(stage: Zero, precision: Precision) -> dict[str, Any]:
    if precision.master != "bf16":
        return {}
    # Its CPU Adam keeps fp32 moments; any other optimizer is admitted with bf16 ones alone.
    whole = stage.offload_optimizer is None
    return {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": whole}


def _fp16_block(scaling: LossScaling) -> dict[str, Any]:
    return {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": round(math.log2(scaling.initial_scale)),
        "loss_scale_window": NEVER,
        "hysteresis": 1,
        "min_loss_scale": 1,
    }


def _zero_block(stage: Zero) -> dict[str, Any]:
    block: dict[str, Any] = {
        "stage": stage.stage,
        "reduce_bucket_size": stage.reduce_bucket_size,
        "overlap_comm": overlaps(stage),
        "contiguous_gradients": stage.contiguous_gradients,
    }
    if stage.stage < 3:
        block["allgather_bucket_size"] = stage.allgather_bucket_size
        block["compute_grad_norm"] = True
        block["round_robin_gradients"] = bool(stage.round_robin_gradients)
    for field, name in STAGE_3_FIELDS.items():
        if getattr(stage, field) is not None:
            block[name] = getattr(stage, field)
    if stage.offload_optimizer is not None:
        block["offload_optimizer"] = _offload_optimizer(stage.offload_optimizer)
    if stage.offload_param is not None:
        block["offload_param"] = _offload_param(stage.offload_param)
    return block


def overlaps(stage: Zero) -> bool:
    """Whether gradients are reduced during backward."""
    return stage.stage == 3 if stage.overlap_comm is None else stage.overlap_comm


def _offload_optimizer(offload: OptimizerOffload) -> dict[str, Any]:
    block: dict[str, Any] = {
        "device": offload.device,
        "pin_memory": offload.pin_memory,
        "ratio": offload.ratio,
    }
    if offload.device == "nvme":
        block |= {
            "nvme_path": offload.path,
            "buffer_count": offload.buffer_count,
            "fast_init": offload.fast_init,
            "pipeline_read": offload.pipeline_read,
            "pipeline_write": offload.pipeline_write,
        }
    return block


def _offload_param(offload: ParameterOffload) -> dict[str, Any]:
    block: dict[str, Any] = {"device": offload.device, "pin_memory": offload.pin_memory}
    if offload.device == "nvme":
        block |= {
            "nvme_path": offload.path,
            "buffer_count": offload.buffer_count,
            "buffer_size": offload.buffer_size,
            "max_in_cpu": offload.max_in_cpu,
        }
    return block


def merge(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """`extra` laid over `base`, nested blocks key by key; neither is changed."""
    merged = copy.deepcopy(dict(base))
    for key, value in extra.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged
