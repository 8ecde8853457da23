"""DeepSpeed's configuration, made from a recipe, and the raw keys that a recipe may add."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline import LossScaling, Precision, Problem
from pipeline.utils import closest

if TYPE_CHECKING:
    from stages.wrap.zero.stage import OptimizerOffload, ParameterOffload, Zero

NEVER = 2**62
"""A loss scale window that never ends: the engine grows the scale itself, see `engine.py`."""

ZERO = "zero_optimization"
STAGE_3_FIELDS = {
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "sub_group_size": "sub_group_size",
}
"""Fields for stage 3 alone -> DeepSpeed's name."""
PLUS_PLUS_FIELDS = {
    "secondary_partition": "zero_hpz_partition_size",
    "quantized_weights": "zero_quantized_weights",
    "quantized_gradients": "zero_quantized_gradients",
}
"""Fields of `plus_plus` -> DeepSpeed's name."""


def generate(stage: Zero, precision: Precision, *, max_grad_norm: float | None) -> dict[str, Any]:
    """The whole configuration, JSON; `stage.extra` merged in (already checked for collisions)."""
    config: dict[str, Any] = {
        # The loop owns batches: it normalises the loss and calls step once per accumulation.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_allreduce_op": "mean",
        "gradient_clipping": max_grad_norm or 0.0,
        "communication_data_type": precision.reduce,
        # The build casts buffers to exactly what the precision policy says.
        "data_types": {"grad_accum_dtype": "fp32", "keep_in_fp32_modules": []},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if precision.compute == "bf16":
        config["bf16"] = {"enabled": True}
        if precision.master == "bf16":
            # DeepSpeed's CPU Adam keeps fp32 moments; it admits any other optimizer with bf16 ones
            # alone.
            on_device = stage.offload_optimizer is None
            config["bf16"] |= {
                "bf16_master_weights_and_grads": True,
                "bf16_optimizer_states": on_device,
            }
    if precision.loss_scaling is not None:
        config["fp16"] = _fp16_block(precision.loss_scaling)
    if stage.aio is not None:
        config["aio"] = asdict(stage.aio)
    return {**config, **stage.extra, ZERO: {**_zero_block(stage), **stage.extra.get(ZERO, {})}}


def _fp16_block(scaling: LossScaling) -> dict[str, Any]:
    return {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": round(math.log2(scaling.initial_scale)),
        "loss_scale_window": NEVER,
        "hysteresis": 1,
        "min_loss_scale": 1,  # `compat.lift_loss_scale_floor` removes it
    }


def _zero_block(stage: Zero) -> dict[str, Any]:
    block: dict[str, Any] = {
        "stage": stage.stage,
        "reduce_bucket_size": stage.reduce_bucket_size,
        # By default gradients are reduced during backward at stage 3 alone.
        "overlap_comm": stage.stage == 3 if stage.overlap_comm is None else stage.overlap_comm,
        "contiguous_gradients": stage.contiguous_gradients,
    }
    if stage.stage < 3:
        block["allgather_bucket_size"] = stage.allgather_bucket_size
        block["compute_grad_norm"] = True
        block["round_robin_gradients"] = bool(stage.round_robin_gradients)
    for field, name in STAGE_3_FIELDS.items():
        if getattr(stage, field) is not None:
            block[name] = getattr(stage, field)
    for field, name in PLUS_PLUS_FIELDS.items():
        if stage.plus_plus is not None and getattr(stage.plus_plus, field):
            block[name] = getattr(stage.plus_plus, field)
    if stage.offload_optimizer is not None:
        block["offload_optimizer"] = _offload_block(stage.offload_optimizer)
    if stage.offload_param is not None:
        block["offload_param"] = _offload_block(stage.offload_param)
    return block


def _offload_block(offload: OptimizerOffload | ParameterOffload) -> dict[str, Any]:
    if offload.device == "cpu":
        return {"device": "cpu", "pin_memory": offload.pin_memory}
    fields = asdict(offload)
    fields["nvme_path"] = fields.pop("path")
    return fields


_FIELDS = (
    *("stage", "reduce_bucket_size", "allgather_bucket_size", "overlap_comm"),
    *("contiguous_gradients", "round_robin_gradients", "offload_optimizer", "offload_param"),
    *("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"),
    *STAGE_3_FIELDS,
    *STAGE_3_FIELDS.values(),
    *PLUS_PLUS_FIELDS.values(),
)
"""Keys of `zero_optimization` that fields of the stage decide."""
_SET_BY = {
    "the train stage": (
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
        "managed_gradient_accumulation gradient_allreduce_op"
    ),
    "the optimizer slot": (
        "optimizer scheduler gradient_clipping zero_allow_untested_optimizer "
        "zero_force_ds_cpu_optimizer"
    ),
    "the precision slot": "bf16 bfloat16 fp16 torch_autocast communication_data_type data_types",
    "the field aio": "aio",
    "the field tensor_parallel": "tensor_parallel",
    "the field context_parallel": "sequence_parallel_size",
    "a field of this stage": " ".join(f"{ZERO}.{field}" for field in _FIELDS),
}
"""Part of the recipe -> keys that it decides."""
_UNSUPPORTED = {
    **dict.fromkeys(
        ("pipeline", "expert_parallel"), "wrap.fsdp divides blocks and experts among ranks"
    ),
    f"{ZERO}.compute_grad_norm": "the gradient norm is always computed",
    f"{ZERO}.elastic_checkpoint": "checkpoints are read on any number of processes",
    f"{ZERO}.zero_quantized_nontrainable_weights": (
        "it rounds frozen weights, which checkpoints hold"
    ),
    f"{ZERO}.zenflow": "it replaces the optimizer step, whose meaning is fixed here",
}
REFUSED: Mapping[str, str] = {
    **{key: f"is set by {part}" for part, keys in _SET_BY.items() for key in keys.split()},
    **{key: f"is not supported: {why}" for key, why in _UNSUPPORTED.items()},
}
"""Raw key, dotted where nested -> what is wrong with it."""
_FREE = (
    "activation_checkpointing autotuning checkpoint comet comms_logger compile csv_monitor "
    "data_efficiency dataloader_drop_last datastates_ckpt disable_allgather "
    "disable_python_gc dump_state flops_profiler gradient_predivide_factor hybrid_engine "
    "log_level memory_breakdown prescale_gradients seq_parallel_communication_data_type "
    "steps_per_print tensorboard timers use_data_before_expert_parallelism "
    "wall_clock_breakdown wandb weight_quantization"
)
KNOWN = frozenset({ZERO, *_FREE.split(), *(key for key in REFUSED if "." not in key)})
"""Every top-level key of DeepSpeed 0.19; a test compares it with the installed one."""


def extra_problems(extra: Mapping[str, Any]) -> Iterator[Problem]:
    """Raw keys that the recipe decides elsewhere, that are not supported, or that are unknown:
    DeepSpeed ignores an unknown top-level key, and refuses one in its blocks as it starts."""
    nested = extra.get(ZERO, {})
    if not isinstance(nested, Mapping):
        yield Problem(key=f"extra.{ZERO}", message="is not a mapping")
        return
    for name, value in {**extra, **{f"{ZERO}.{key}": nested[key] for key in nested}}.items():
        where = f"extra.{name}"
        if name in REFUSED:
            yield Problem(key=where, message=REFUSED[name], hint="leave it out")
        elif "." not in name and name not in KNOWN:
            near = closest(name, KNOWN)
            hint = f"did you mean {near}?" if near else "see DeepSpeed's configuration reference"
            yield Problem(key=where, message="is not a key that DeepSpeed knows", hint=hint)
        elif value == "auto":
            yield Problem(key=where, message="DeepSpeed ignores the value auto")
