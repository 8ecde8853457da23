"""The keys of `accelerate config` files and of DeepSpeed configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.importing import rules
from stages.importing.draft import Draft
from stages.importing.rules import Table, table

FSDP = table("""
    version: always 2, 1, "1", "2"
    sharding_strategy reshard_after_forward: fsdp.sharding full_shard, 1=full_shard, \
        true=full_shard, shard_grad_op, 2=shard_grad_op, false=shard_grad_op, no_shard, \
        3=no_shard, hybrid_shard, 4=hybrid_shard -- use FULL_SHARD or HYBRID_SHARD
    offload_params cpu_offload: fsdp.cpu_offload truth
    auto_wrap_policy: policy transformer_based_wrap=block, no_wrap=none
    transformer_layer_cls_to_wrap transformer_cls_names_to_wrap: classes names off=,[]
    min_num_params: always 0 | forward_prefetch: fsdp.* flag
    activation_checkpointing: model.* = {}
""", flag=lambda value: int(rules.truth(value)))  # fmt: skip
"""Keys without the prefix `fsdp_`. Shardings have names and numbers in torch's ShardingStrategy,
and are true or false in FSDP2."""
FSDP_PREFIXED: Table = {**FSDP, **{f"fsdp_{key}": rule for key, rule in FSDP.items()}}
"""Keys with and without the prefix; accelerate and transformers accept both."""
PLAIN_WORDS = ("auto_wrap", "full_shard", "true")
WORDS: Mapping[str, tuple[str, Any]] = {
    "offload": ("fsdp.cpu_offload", True),
    **{word: ("fsdp.sharding", word) for word in ("shard_grad_op", "hybrid_shard")},
}
"""Words of the key `fsdp` of TrainingArguments -> facts that they give besides the strategy."""


def _words(value: Any) -> list[str]:
    found = value if isinstance(value, list) else str(value).replace(",", " ").split()
    return [str(each).lower() for each in found]


def fsdp_strategy(value: Any) -> str:
    """Return the stage for the words of the key `fsdp`. Raises WrongValueError for unknown ones."""
    if unknown := [word for word in _words(value) if word not in {*WORDS, *PLAIN_WORDS}]:
        hint = "set fsdp: true, and fsdp_config"
        raise rules.WrongValueError(f"{unknown[0]!r} is not a known word !! {hint}")
    return "wrap.fsdp"


def set_words(draft: Draft, value: Any) -> None:
    """Add what the words of the key `fsdp` say; keys of fsdp_config win over them."""
    for word in (each for each in _words(value) if value and each in WORDS):
        draft.default(*WORDS[word], f"{word} in fsdp")


PARALLELISM = table("""
    dp_replicate_size: parallel.replicate positive | dp_shard_size: parallel.shard positive
    tp_size: parallel.tensor positive | cp_size: parallel.context positive
    cp_backend: always torch | sp_size: parallel.sequence positive | sp_backend: always deepspeed
""")
"""Keys without the prefix that they have in files."""
ACCELERATE_ENGINE = table("""
    deepspeed_config_file: refused must name a file | zero_stage: zero.stage 0=0, 1=1, 2=2, 3=3 !!
    gradient_accumulation_steps: accumulation positive auto=1
    gradient_clipping: optimizer.max_grad_norm max_norm auto=1.0
    offload_optimizer_device: zero.offload_optimizer.device none, cpu, nvme
    offload_optimizer_nvme_path: zero.offload_optimizer.path path off=none
    offload_param_device: zero.offload_param.device none, cpu, nvme
    offload_param_nvme_path: zero.offload_param.path path off=none
""")
"""Keys of the block `deepspeed_config`."""
ACCELERATE: Table = {
    **table("""
    compute_environment: always local_machine !! use LOCAL_MACHINE
    distributed_type: distributed no=one, multi_gpu=wrap.ddp, multi_cpu=wrap.ddp, fsdp=wrap.fsdp, \
        deepspeed=wrap.zero !! use MULTI_GPU, FSDP or DEEPSPEED
    mixed_precision: precision.compute no=fp32, false=fp32, fp16, bf16 !! write bf16; products in \
        fp8: set model.fp8 in the recipe
    fp16: precision.compute = fp16 | use_cpu: launch.device = cpu
    num_processes: procs positive off=-1
    fp8_config: refused fp8 products are a setting of the model slot -- set model.fp8 in the recipe
    """),
    "fsdp_config": FSDP_PREFIXED, "deepspeed_config": ACCELERATE_ENGINE,
    "parallelism_config": {f"parallelism_config_{key}": rule for key, rule in PARALLELISM.items()},
}  # fmt: skip
"""`false` is YAML 1.1's value of an unquoted no."""


def _leaf_module(value: Any) -> rules.RuleResult:
    """Read a setting of DeepSpeed's own, which wrap.zero hands on."""
    fact = "zero.extra.zero_optimization.leaf_module"
    return rules.unset() if rules.is_off(value) else rules.translated(fact, value)


STAGE_3 = (
    "max_live_parameters", "max_reuse_distance", "param_persistence_threshold",
    "prefetch_bucket_size", "sub_group_size",
)  # fmt: skip
"""Fields of wrap.zero that have an effect at stage 3 only."""
DEEPSPEED = table("""
    train_batch_size: global_batch positive
    train_micro_batch_size_per_gpu: train.micro_batch_size positive auto=8
    gradient_accumulation_steps: accumulation positive auto=1
    gradient_clipping: optimizer.max_grad_norm max_norm auto=1.0
    communication_data_type: precision.reduce fp32, fp16, bf16
    sequence_parallel_size: parallel.sequence positive
    pipeline: refused wrap.zero puts every block on each rank !! use wrap.fsdp with \
        pipeline_parallel
    expert_parallel: refused wrap.zero puts every expert on each rank !! use wrap.fsdp with \
        expert_parallel
    [optimizer]
    type: foreign optimizer adam=adamw, adamw
    [optimizer.params]
    lr: optimizer.* number auto=5e-5 | betas: betas betas auto=[0.9,0.999]
    eps: optimizer.* number auto=1e-8 | weight_decay: optimizer.* number auto=0.0
    max_grad_norm: optimizer.* number off=0 | torch_adam: zero.optimizer_implementation = torch
    adam_w_mode: always true -- choose another optimizer stage (`pipe stages`), and a rate for it
    [scheduler]
    type: deepspeed.schedule warmuplr=constant, warmupdecaylr=linear, warmupcosinelr=cosine -- use \
        WarmupDecayLR
    [scheduler.params]
    warmup_min_lr: always 0 | warmup_max_lr: optimizer.lr number auto=5e-5
    warmup_num_steps: warmup_steps whole auto=0 | warmup_type: always linear -- set linear
    cos_min_ratio: optimizer.final_lr_ratio number | total_num_steps: schedule_steps positive
    [fp16]
    enabled: if auto then precision.compute auto=fp32 else precision.compute = fp16
    loss_scale: always 0 -- set loss_scale: 0
    initial_scale_power: precision.initial_loss_scale scales
    loss_scale_window: precision.loss_scale_growth_interval positive
    [bf16 bfloat16]
    enabled: if auto then precision.compute auto=fp32 else precision.compute = bf16
    bf16_master_weights_and_grads: precision.master = bf16
    [zero_optimization]
    stage: zero.* 0=0, 1=1, 2=2, 3=3 !! | reduce_bucket_size allgather_bucket_size: zero.* count
    overlap_comm contiguous_gradients round_robin_gradients: zero.* truth
    max_live_parameters max_reuse_distance param_persistence_threshold prefetch_bucket_size
    sub_group_size: zero.* count
    zero_hpz_partition_size: zero.plus_plus.secondary_partition positive off=0,1
    zero_quantized_weights: zero.plus_plus.quantized_weights = true
    zero_quantized_gradients: zero.plus_plus.quantized_gradients = true | leaf_module: @leaf_module
    [zero_optimization.offload_optimizer]
    device: zero.offload_optimizer.* none, cpu, nvme
    nvme_path: zero.offload_optimizer.path path off=none
    pin_memory: zero.offload_optimizer.* truth | ratio: always 1
    [zero_optimization.offload_param]
    device: zero.offload_param.* none, cpu, nvme | nvme_path: zero.offload_param.path path off=none
    pin_memory: zero.offload_param.* truth
    [data_types]
    grad_accum_dtype: always fp32 | buffer_dtype: precision.buffer fp32, fp16, bf16
    [tensor_parallel]
    autotp_size: deepspeed.tensor positive off=0 | tp.tp_size: ignored follows autotp_size
    partition_config preset_model: refused layers are divided by the architecture's plan -- name \
        others in wrap.tensor_parallel.plan
""",
    leaf_module=_leaf_module,
    # A bucket of one element is sent after every tensor, and so is a bucket of none.
    count=lambda value: max(rules.whole(value), 1),
    scales={str(power): float(2**power) for power in range(33)},
)  # fmt: skip
_zero = DEEPSPEED["zero_optimization"]
_zero.update({f"stage3_{name}": _zero[name] for name in STAGE_3})


def set_defaults(draft: Draft, *, alone: bool) -> None:
    """Add DeepSpeed 0.19's defaults; `alone` means without TrainingArguments."""
    own = "DeepSpeed's default"
    steps, scheduled = draft.given("optimizer"), draft.given("deepspeed.schedule")
    cosine = scheduled and draft.value("deepspeed.schedule") == "cosine"
    flat, scaled = alone and steps and not scheduled, draft.value("precision.compute") == "fp16"
    for fact, value, why, holds in (
        ("optimizer.max_grad_norm", None, own, alone),
        ("optimizer.decay_all", True, "DeepSpeed decays every parameter", steps),
        ("optimizer.weight_decay", 0.0, own, steps),
        ("schedule", "flat", "DeepSpeed's default is a constant rate", flat),
        ("warmup_steps", 1000, own, scheduled),
        ("optimizer.final_lr_ratio", 1e-4, own, cosine),
        ("precision.loss_scale_growth_interval", 1000, own, scaled),
    ):
        draft.default(fact, value, why, when=holds and not draft.given(fact))
