"""DeepSpeed's configuration, made from a recipe, and mistakes in a wrap.zero slot that show before
anything starts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline import OptimizerPlan, PlanView, Precision, Problem, UpdateRule, traits
from pipeline.utils import closest
from stages.model.config_checks import declarations
from stages.wrap.zero.fields import RULE, Offload, PlusPlus, ZeroFields

if TYPE_CHECKING:
    from torch import nn

ZERO = "zero_optimization"
STAGE_3_FIELDS = {
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "sub_group_size": "sub_group_size",
}
"""Fields for stage 3 only -> DeepSpeed's name."""
PLUS_PLUS_FIELDS = {
    "secondary_partition": "zero_hpz_partition_size",
    "quantized_weights": "zero_quantized_weights",
    "quantized_gradients": "zero_quantized_gradients",
}
"""Fields of `plus_plus` -> DeepSpeed's name."""


def generate(
    stage: ZeroFields, precision: Precision, *, max_grad_norm: float | None
) -> dict[str, Any]:
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
            config["bf16"] |= {
                "bf16_master_weights_and_grads": True,
                # Offloaded, DeepSpeed's CPU Adam keeps fp32 moments.
                "bf16_optimizer_states": stage.offload_optimizer is None,
            }
    if precision.loss_scaling is not None:
        config["fp16"] = {
            "enabled": True,
            "loss_scale": 0,  # dynamic; the engine sets it
            "initial_scale_power": round(math.log2(precision.loss_scaling.initial_scale)),
            "loss_scale_window": 2**62,
            "hysteresis": 1,
            "min_loss_scale": 1,
        }
    if stage.aio is not None:
        config["aio"] = asdict(stage.aio)
    return {**config, **stage.extra, ZERO: {**_zero_block(stage), **stage.extra.get(ZERO, {})}}


def _zero_block(stage: ZeroFields) -> dict[str, Any]:
    block: dict[str, Any] = {
        "stage": stage.stage,
        "reduce_bucket_size": stage.reduce_bucket_size,
        "overlap_comm": stage.stage == 3 if stage.overlap_comm is None else stage.overlap_comm,
        "contiguous_gradients": stage.contiguous_gradients,
    }
    if stage.stage < 3:
        block["allgather_bucket_size"] = stage.allgather_bucket_size
        block["compute_grad_norm"] = True
        block["round_robin_gradients"] = bool(stage.round_robin_gradients)
    given = ((name, getattr(stage, field)) for field, name in STAGE_3_FIELDS.items())
    block |= {name: value for name, value in given if value is not None}
    plus_plus = stage.plus_plus or PlusPlus()
    given = ((name, getattr(plus_plus, field)) for field, name in PLUS_PLUS_FIELDS.items())
    block |= {name: value for name, value in given if value}
    for name in ("offload_optimizer", "offload_param"):
        offload: Offload | None = getattr(stage, name)
        if offload is not None and offload.device == "cpu":
            block[name] = {"device": "cpu", "pin_memory": offload.pin_memory}
        elif offload is not None:
            fields = asdict(offload)
            block[name] = {"nvme_path": fields.pop("path"), **fields}
    return block


def beyond_bucket(stage: ZeroFields, module: nn.Module) -> str:
    """A warning of the largest gradient that stage 2 would reduce outside of its bucket during
    backward; empty if there is none. DeepSpeed 0.19 reduces it on another stream and frees it,
    without telling the allocator of that stream, on ranks that hold no part of it
    (`average_tensor`, `clear_grad_attribute`)."""
    if not stage.overlap_comm or stage.stage != 2 or stage.offload_optimizer is not None:
        return ""
    trained = ((name, one.numel()) for name, one in module.named_parameters() if one.requires_grad)
    name, most = max(trained, key=lambda pair: pair[1], default=("", 0))
    if most <= stage.reduce_bucket_size:
        return ""
    text = f"overlap_comm: the gradient of {name} is larger than reduce_bucket_size, and DeepSpeed "
    return f"{text}may use its memory again before it is sent; set reduce_bucket_size: {most}"


Row = tuple[object, str, str, str]
"""Whether something is wrong, then key, message and hint of the problem."""


def problems(stage: ZeroFields, plan: PlanView) -> Iterator[Problem]:
    """Every problem of `stage`, keys relative to it."""
    rows, master = list(_stage_rows(stage, plan)), "fp32"
    policy = plan.producer(stage, Precision)
    if isinstance(policy, traits.DeclaresDtypes):
        master = policy.master
        rows += _precision_rows(stage, policy)
    repeats = (
        isinstance(model, traits.ChangesBlocks) and model.recomputes_operations
        for model in declarations(stage, plan)
    )
    rows.append((
        stage.stage == 3 and any(repeats), "stage",
        "the model slot's activation_checkpointing.keep makes torch repeat the operations of "
        "forward one by one, and stage 3 gathers parameters in between",
        "set keep: nothing there, or stage: 2",
    ))  # fmt: skip
    yield from (
        Problem(key=key, message=text, hint=hint) for wrong, key, text, hint in rows if wrong
    )
    optimizer = plan.producer(stage, OptimizerPlan)
    if isinstance(optimizer, traits.DeclaresRules):
        yield from rule_problems(stage, master, optimizer.update_rules())
    # Raw keys that the recipe decides elsewhere, that are not supported, or that are unknown:
    # DeepSpeed ignores an unknown top-level key, and refuses one in its blocks as it starts.
    nested = stage.extra.get(ZERO, {})
    if not isinstance(nested, Mapping):
        yield Problem(key=f"extra.{ZERO}", message="is not a mapping")
        return
    for name, value in {**stage.extra, **{f"{ZERO}.{key}": nested[key] for key in nested}}.items():
        where = f"extra.{name}"
        if name in REFUSED:
            yield Problem(key=where, message=REFUSED[name], hint="leave it out")
        elif "." not in name and name not in KNOWN:
            near = closest(name, KNOWN)
            hint = f"did you mean {near}?" if near else "see DeepSpeed's configuration reference"
            yield Problem(key=where, message="is not a key that DeepSpeed knows", hint=hint)
        elif value == "auto":
            yield Problem(key=where, message="DeepSpeed ignores the value auto")


def _stage_rows(stage: ZeroFields, plan: PlanView) -> Iterator[Row]:
    for key in ("offload_param", "plus_plus", *STAGE_3_FIELDS):
        given = getattr(stage, key) is not None
        yield stage.stage < 3 and given, key, "needs stage 3", "set stage: 3 or leave it out"
    yield (
        stage.stage == 1 and stage.overlap_comm, "overlap_comm",
        "stage 1 reduces gradients once a step, not during backward",
        "set stage: 2 or overlap_comm: false",
    )  # fmt: skip
    path = "device: nvme needs `path`, the folder that it writes to; cpu needs none"
    for block in ("offload_optimizer", "offload_param"):
        offload: Offload = getattr(stage, block) or Offload()
        on_disk = offload.device == "nvme"
        yield on_disk and stage.stage < 3, f"{block}.device", "nvme needs stage 3", ""
        yield on_disk != bool(offload.path), f"{block}.path", path, ""
    asked, key = stage.plus_plus or PlusPlus(), "plus_plus.secondary_partition"
    group, tensor = asked.secondary_partition, stage.tensor_parallel
    message = f"{plan.procs} processes do not divide into groups of {group}"
    yield group and plan.procs % group, key, message, ""
    swapped = stage.offload_param and stage.offload_param.device == "nvme"
    yield group and swapped, key, "DeepSpeed keeps no second copy on a disk", ""
    yield (
        stage.plus_plus and tensor and tensor.size > 1, "plus_plus",
        "DeepSpeed builds the groups of ZeRO++ from all ranks, and with tensor_parallel these hold "
        "different parts of the layers",
        "leave out tensor_parallel",
    )  # fmt: skip
    for field in ("quantized_weights", "quantized_gradients"):
        wrong = getattr(asked, field) and plan.device == "cpu"
        yield wrong, f"plus_plus.{field}", "DeepSpeed quantizes on GPUs only", "leave it out"


def _precision_rows(stage: ZeroFields, policy: traits.DeclaresDtypes) -> Iterator[Row]:
    offloaded, narrow = stage.offload_optimizer is not None, policy.master == "bf16"
    asks = "the precision slot asks for"
    wrong = policy.compute == "fp16" and policy.reduce == "bf16"
    yield wrong, "stage", "fp16 gradients cannot be reduced in bf16", ""
    wrong = policy.master == "fp16"
    yield wrong, "stage", f"{asks} fp16 master weights; ZeRO keeps fp32", ""
    yield (
        narrow and not offloaded and stage.stage == 1, "stage",
        f"{asks} bf16 master weights; stage 1 keeps fp32",
        "set stage: 2 or 3, or add offload_optimizer",
    )  # fmt: skip
    yield (
        narrow and offloaded and stage.optimizer_implementation == "torch",
        "optimizer_implementation", "offloaded bf16 master weights need DeepSpeed's CPU Adam",
        "set it to auto, leave offload_optimizer out, or set master: fp32 in the precision slot",
    )  # fmt: skip
    asked = stage.plus_plus or PlusPlus()
    # Its kernels read and write fp16, and take other gradients for fp16 as they are.
    yield (
        asked.quantized_weights and policy.compute == "fp32", "plus_plus.quantized_weights",
        "parameters would be rounded to fp16 before they are quantized",
        "set compute: bf16 or fp16 in the precision slot",
    )  # fmt: skip
    yield (
        asked.quantized_gradients and policy.reduce != "fp16", "plus_plus.quantized_gradients",
        f"DeepSpeed would take gradients in {policy.reduce} for fp16 ones",
        "set reduce: fp16 in the precision slot",
    )  # fmt: skip


def rule_problems(stage: ZeroFields, master: str, rules: Sequence[UpdateRule]) -> Iterator[Problem]:
    """Rules that DeepSpeed cannot run, or not with masters of a dtype under this offload."""
    names, offload = [rule.algorithm for rule in rules], stage.offload_optimizer
    whole = [rule.algorithm for rule in rules if not rule.elementwise]
    asked = f"which computes {RULE}; the optimizer slot asks for {', '.join(names)}"
    key, hint = "stage", "use wrap.fsdp, or another optimizer"
    if whole:
        message = f"the optimizer slot's rule {whole[0]} needs whole matrices, and DeepSpeed "
        message += "divides all parameters together, as one flat tensor"
    elif len(rules) > 1:
        message = f"DeepSpeed takes one optimizer, the optimizer slot asks for {', '.join(names)}"
    elif offload is None or not rules or names == [RULE]:
        return
    elif offload.device == "nvme":
        key, hint = "offload_optimizer.device", "set device: cpu"
        message = f"nvme needs DeepSpeed's CPU Adam, {asked}"
    elif master == "bf16":
        key, hint = "offload_optimizer", "leave it out or set master: fp32 in the precision slot"
        message = f"offloaded bf16 master weights need DeepSpeed's CPU Adam, {asked}"
    else:
        return
    yield Problem(key=key, message=message, hint=hint)


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
