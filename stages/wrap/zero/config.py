"""DeepSpeed's configuration: what a recipe makes of it, and which raw keys a recipe may add."""

from __future__ import annotations

import copy
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

STAGE_3_FIELDS = {
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "sub_group_size": "sub_group_size",
}
"""Fields for stage 3 alone -> DeepSpeed's name."""


def generate(stage: Zero, precision: Precision, *, max_grad_norm: float | None) -> dict[str, Any]:
    """The whole configuration, JSON; `stage.extra` merged in (already checked for collisions)."""
    return merge(_decided(stage, precision, max_grad_norm), stage.extra)


def _decided(stage: Zero, precision: Precision, max_grad_norm: float | None) -> dict[str, Any]:
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
        "zero_optimization": _zero_block(stage),
    }
    if precision.compute == "bf16":
        config["bf16"] = {"enabled": True, **_bf16_masters(stage, precision)}
    if precision.loss_scaling is not None:
        config["fp16"] = _fp16_block(precision.loss_scaling)
    if stage.aio is not None:
        config["aio"] = asdict(stage.aio)
    return config


def _bf16_masters(stage: Zero, precision: Precision) -> dict[str, Any]:
    if precision.master != "bf16":
        return {}
    # DeepSpeed's CPU Adam keeps fp32 moments; it admits any other optimizer with bf16 ones alone.
    on_device = stage.offload_optimizer is None
    return {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": on_device}


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
    for name in OFFLOAD_FIELDS:
        if getattr(stage, name) is not None:
            block[name] = _offload_block(getattr(stage, name))
    return block


def _offload_block(offload: OptimizerOffload | ParameterOffload) -> dict[str, Any]:
    fields = asdict(offload)
    fields["nvme_path"] = fields.pop("path")
    if offload.device == "nvme":
        return fields
    return {key: fields[key] for key in ("device", "pin_memory", "ratio") if key in fields}


def merge(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """`extra` laid over `base`, nested blocks key by key; neither is changed."""
    merged = copy.deepcopy(dict(base))
    for key, value in extra.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


_SET_BY = {
    "the train stage": (
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
        "managed_gradient_accumulation gradient_allreduce_op"
    ),
    "the optimizer slot": (
        "optimizer scheduler gradient_clipping zero_allow_untested_optimizer "
        "zero_force_ds_cpu_optimizer"
    ),
    "the precision slot": ("bf16 bfloat16 fp16 torch_autocast communication_data_type data_types"),
    "the field aio": "aio",
}
"""Part of the recipe -> top-level keys that it decides."""
_ZERO_SET_BY = {
    **{
        f"the field {field}": field
        for field in (
            "stage", "reduce_bucket_size", "allgather_bucket_size", "overlap_comm",
            "contiguous_gradients", "round_robin_gradients", "sub_group_size",
        )
    },
    **{f"the field {field}": f"{field} {name}" for field, name in STAGE_3_FIELDS.items()},
    "the field offload_optimizer": "cpu_offload",
    "the field offload_param": "cpu_offload_param",
    "pin_memory in the offload blocks": "cpu_offload_use_pin_memory",
}  # fmt: skip
"""The same for keys of `zero_optimization`."""
OFFLOAD_FIELDS = {
    "offload_optimizer": (
        "device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio"
    ),
    "offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
}
"""Offload block -> its keys that are fields of the stage."""
_SHAPE = "this stage shards over data-parallel ranks only"
_APART = "it keeps optimizer state in a process of its own, which no checkpoint reaches"
_UNSUPPORTED = {
    "pipeline": _SHAPE,
    "tensor_parallel": _SHAPE,
    "expert_parallel": _SHAPE,
    "sequence_parallel_size": _SHAPE,
    "zero_optimization.compute_grad_norm": "the gradient norm is always computed",
    "zero_optimization.elastic_checkpoint": "checkpoints are read on any number of processes",
    "zero_optimization.zero_quantized_nontrainable_weights": (
        "it rounds frozen weights, which checkpoints hold"
    ),
    "zero_optimization.zenflow": "it replaces the optimizer step, whose meaning is fixed here",
    "zero_optimization.offload_optimizer.super_offload": _APART,
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": _APART,
}

REFUSED: Mapping[str, str] = {
    **{key: f"is set by {part}" for part, keys in _SET_BY.items() for key in keys.split()},
    **{
        f"zero_optimization.{key}": f"is set by {part}"
        for part, keys in _ZERO_SET_BY.items()
        for key in keys.split()
    },
    **{
        f"zero_optimization.{block}.{key}": (
            f"is set by the field {block}.{'path' if key == 'nvme_path' else key}"
        )
        for block, keys in OFFLOAD_FIELDS.items()
        for key in keys.split()
    },
    **{key: f"is not supported: {why}" for key, why in _UNSUPPORTED.items()},
}
"""Raw key, dotted where nested -> what is wrong with it."""
_FREE: Mapping[str, str] = {
    "": (
        "activation_checkpointing autotuning checkpoint comet comms_logger compile csv_monitor "
        "data_efficiency dataloader_drop_last datastates_ckpt disable_allgather "
        "disable_python_gc dump_state flops_profiler gradient_predivide_factor hybrid_engine "
        "log_level memory_breakdown prescale_gradients seq_parallel_communication_data_type "
        "steps_per_print tensorboard timers use_data_before_expert_parallelism "
        "wall_clock_breakdown wandb weight_quantization"
    ),
    "zero_optimization.": (
        "allgather_partitions allgather_sequential enable_sanity_checks "
        "gather_16bit_weights_on_model_save ignore_unused_parameters legacy_stage1 "
        "load_from_fp32_weights log_trace_cache_warnings memory_efficient_linear "
        "model_persistence_threshold module_granularity_threshold override_module_apply "
        "parameter_alignment pipeline_loading_checkpoint reduce_scatter "
        "save_muon_momentum_buffer_in_memory stage3_allgather_sequential "
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "stage3_model_persistence_threshold stage3_module_granularity_threshold "
        "stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params "
        "use_multi_rank_bucket_allreduce zero_hpz_partition_size zero_quantized_gradients "
        "zero_quantized_weights"
    ),
    "zero_optimization.leaf_module.": "classes names name_suffixes",
}
BLOCKS = (
    "zero_optimization",
    *(f"zero_optimization.{b}" for b in (*OFFLOAD_FIELDS, "leaf_module")),
)
"""Raw keys whose own keys are checked too."""
KNOWN = frozenset(
    {*REFUSED, *BLOCKS, *(f"{place}{key}" for place, keys in _FREE.items() for key in keys.split())}
)
"""Every key of DeepSpeed 0.19, dotted where nested; a test compares it with the installed one."""


def extra_problems(extra: Mapping[str, Any], place: str = "") -> Iterator[Problem]:
    """Raw keys that the recipe decides elsewhere, that are not supported, or that are unknown:
    DeepSpeed ignores an unknown top-level key."""
    for key, value in extra.items():
        name = f"{place}{key}"
        where = f"extra.{name}"
        if name in REFUSED:
            yield Problem(key=where, message=REFUSED[name], hint="leave it out")
        elif name in BLOCKS:
            if isinstance(value, Mapping):
                yield from extra_problems(value, f"{name}.")
            else:
                yield Problem(key=where, message="is not a mapping")
        elif name not in KNOWN:
            siblings = [k.removeprefix(place) for k in KNOWN if k.rpartition(".")[0] == place[:-1]]
            near = closest(key, siblings)
            hint = f"did you mean {near}?" if near else "see DeepSpeed's configuration reference"
            yield Problem(key=where, message="is not a key that DeepSpeed knows", hint=hint)
        elif value == "auto":
            yield Problem(key=where, message="DeepSpeed ignores the value auto")
