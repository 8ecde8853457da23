"""The keys of `accelerate config` files and of DeepSpeed configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.importing import rules
from stages.importing.report import Report
from stages.importing.rules import Rule, Table, allowed, number, positive, sets, truth, when_on

SHARDINGS = {
    "full_shard": "full_shard", "1": "full_shard", "true": "full_shard",
    "shard_grad_op": "shard_grad_op", "2": "shard_grad_op", "false": "shard_grad_op",
    "no_shard": "no_shard", "3": "no_shard", "hybrid_shard": "hybrid_shard", "4": "hybrid_shard",
}  # fmt: skip
"""Names and numbers of torch's ShardingStrategy, and FSDP2's `reshard_after_forward`."""
UNITS = {"transformer_based_wrap": "block", "no_wrap": "none"}
RECOMPUTE = when_on("model.activation_checkpointing", {})
FSDP = rules.table({
    "version": allowed(2, 1, "1", "2"),
    "sharding_strategy reshard_after_forward": sets(
        "fsdp.sharding", rules.choice(SHARDINGS, "use FULL_SHARD or HYBRID_SHARD")),
    "offload_params cpu_offload": sets("fsdp.cpu_offload", truth),
    "auto_wrap_policy": sets("policy", rules.choice(UNITS)),
    "transformer_layer_cls_to_wrap transformer_cls_names_to_wrap": sets(
        "classes", rules.names, off=("", [])),
    "min_num_params": allowed(0),
    "forward_prefetch": sets("fsdp.forward_prefetch", lambda value: int(truth(value))),
    "activation_checkpointing": RECOMPUTE,
})  # fmt: skip
"""Keys without the prefix `fsdp_`."""
FSDP_PREFIXED: Table = {**FSDP, **{f"fsdp_{key}": rule for key, rule in FSDP.items()}}
"""Keys with and without the prefix; accelerate and transformers accept both."""
WORDS: Mapping[str, Mapping[str, Any]] = {
    **{word: {} for word in ("auto_wrap", "full_shard", "true")},
    **{word: {"fsdp.sharding": word} for word in ("shard_grad_op", "hybrid_shard")},
    "offload": {"fsdp.cpu_offload": True},
}
"""Words of the key `fsdp` of TrainingArguments -> facts that they give besides the strategy."""


def _words(value: Any) -> list[str]:
    found = value if isinstance(value, list) else str(value).replace(",", " ").split()
    return [str(each).lower() for each in found]


def fsdp_strategy(value: Any) -> str:
    """Return the stage for the words of the key `fsdp`. Raises WrongValueError for unknown ones."""
    if unknown := [word for word in _words(value) if word not in WORDS]:
        hint = "set fsdp: true, and fsdp_config"
        raise rules.WrongValueError(f"{unknown[0]!r} is not a known word", hint, blocks=True)
    return "wrap.fsdp"


def set_words(report: Report, value: Any) -> None:
    """Add what the words of the key `fsdp` say; keys of fsdp_config win over them."""
    for word in _words(value):
        for fact, content in WORDS.get(word, {}).items():
            report.default(fact, content, f"{word} in fsdp")


def max_norm(value: Any) -> float | None:
    """Return the norm to clip gradients to; 0 means no clipping."""
    return number(value) or None


def _offload(block: str, prefix: str = "") -> dict[str, Rule]:
    return {
        f"{prefix}device": sets(f"zero.{block}.device", rules.choice(("none", "cpu", "nvme"))),
        f"{prefix}nvme_path": sets(f"zero.{block}.path", rules.path, off=("none",)),
    }


_stage = sets("zero.stage", rules.choice({str(n): n for n in range(4)}, blocks=True))
_BATCHES: Table = {
    "gradient_accumulation_steps": sets("accumulation", positive, 1),
    "gradient_clipping": sets("optimizer.max_grad_norm", max_norm, 1.0),
}
PARALLELISM: Table = {
    "dp_replicate_size": sets("parallel.replicate", positive),
    "dp_shard_size": sets("parallel.shard", positive),
    "tp_size": sets("parallel.tensor", positive),
    "cp_size": sets("parallel.context", positive), "cp_backend": allowed("torch"),
    "sp_size": sets("parallel.sequence", positive), "sp_backend": allowed("deepspeed"),
}  # fmt: skip
"""Keys without the prefix that they have in files."""
STRATEGIES = {
    "no": "one", "multi_gpu": "wrap.ddp", "multi_cpu": "wrap.ddp", "fsdp": "wrap.fsdp",
    "deepspeed": "wrap.zero",
}  # fmt: skip
PRECISIONS = {"no": "fp32", "false": "fp32", "fp16": "fp16", "bf16": "bf16"}
"""`false` is YAML 1.1's value of an unquoted no."""
FP8 = "set model.fp8 in the recipe"
ACCELERATE: Table = {
    "compute_environment": allowed("local_machine", hint="use LOCAL_MACHINE", blocks=True),
    "distributed_type": sets(
        "distributed", rules.choice(STRATEGIES, "use MULTI_GPU, FSDP or DEEPSPEED", blocks=True)),
    "mixed_precision": sets("precision.compute", rules.choice(
        PRECISIONS, f"write bf16; products in fp8: {FP8}", blocks=True)),
    "fp16": when_on("precision.compute", "fp16"), "use_cpu": when_on("launch.device", "cpu"),
    "num_processes": sets("procs", positive, off=(-1,)),
    "fp8_config": rules.unsupported("fp8 products are a setting of the model slot", FP8),
    "deepspeed_config": {
        "deepspeed_config_file": rules.unsupported("must name a file"),
        "zero_stage": _stage,
        **_BATCHES,
        **_offload("offload_optimizer", "offload_optimizer_"),
        **_offload("offload_param", "offload_param_"),
    },
    "fsdp_config": FSDP_PREFIXED,
    "parallelism_config": {f"parallelism_config_{key}": rule for key, rule in PARALLELISM.items()},
}  # fmt: skip


def _count(value: Any) -> int:
    # A bucket of one element is sent after every tensor, and so is a bucket of none.
    return max(rules.whole(value), 1)


def _fields(read: rules.Read, *names: str) -> dict[str, Rule]:
    """Return rules for keys that are called like fields of wrap.zero."""
    return {name: sets(f"zero.{name}", read) for name in names}


def _block(name: str) -> dict[str, Rule]:
    return {**_offload(name), "pin_memory": sets(f"zero.{name}.pin_memory", truth)}


STAGE_3 = (
    "max_live_parameters", "max_reuse_distance", "param_persistence_threshold",
    "prefetch_bucket_size", "sub_group_size",
)  # fmt: skip
"""Fields of wrap.zero that have an effect at stage 3 only."""
_stage_3 = _fields(_count, *STAGE_3)
ZERO: Table = {
    "stage": _stage,
    "offload_optimizer": {**_block("offload_optimizer"), "ratio": allowed(1)},
    "offload_param": _block("offload_param"),
    **_fields(_count, "reduce_bucket_size", "allgather_bucket_size"),
    **_fields(truth, "overlap_comm", "contiguous_gradients", "round_robin_gradients"),
    **_stage_3,
    **{f"stage3_{name}": rule for name, rule in _stage_3.items()},
    "zero_hpz_partition_size": sets("zero.plus_plus.secondary_partition", positive, off=(0, 1)),
    "zero_quantized_weights": when_on("zero.plus_plus.quantized_weights", True),
    "zero_quantized_gradients": when_on("zero.plus_plus.quantized_gradients", True),
    "leaf_module": when_on("zero.extra.zero_optimization.leaf_module"),  # DeepSpeed's own
}


def _enabled(dtype: str) -> Rule:
    automatic = sets("precision.compute", truth, "fp32")
    on = when_on("precision.compute", dtype)
    return lambda value: automatic(value) if value == "auto" else on(value)


def read_betas(value: Any) -> list[float]:
    """Return the two decay rates of Adam."""
    if not isinstance(value, list) or len(value) != 2:
        raise rules.WrongValueError(f"must be two numbers, not {value!r}")
    return [number(each) for each in value]


CHOOSE = "choose another optimizer stage (`pipe stages`), and a rate for it"
FOREIGN = "other optimizer"
"""Fact: the name of an optimizer that recipes do not have."""


def foreign(rule: Rule, name: rules.Read = str) -> Rule:
    """Return the rule with the fact FOREIGN for a value that it refuses."""

    def named(value: Any) -> rules.RuleResult:
        result = rules.applied(rule, value)
        if result.outcome == "refused":
            result.fact, result.content = FOREIGN, name(value)
        return result

    return named


def optimizer_rule(fact: str, known: Mapping[str, Any]) -> Rule:
    """Return a rule for the name of an optimizer. Another one is refused."""
    return foreign(sets(fact, rules.choice(known, CHOOSE)))


SCALES = {str(power): float(2**power) for power in range(33)}
SCHEDULES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
_dtype = rules.choice(("fp32", "fp16", "bf16"))
_own_plan = rules.unsupported(
    "layers are divided by the architecture's plan", "name others in wrap.tensor_parallel.plan"
)
DEEPSPEED = rules.table({
    "train_batch_size": sets("global_batch", positive),
    "train_micro_batch_size_per_gpu": sets("train.micro_batch_size", positive, 8),
    **_BATCHES,
    "optimizer": {
        "type": optimizer_rule("optimizer", {"adam": "adamw", "adamw": "adamw"}),
        "params": {
            "lr": sets("optimizer.lr", number, 5e-5),
            "betas": sets("betas", read_betas, [0.9, 0.999]),
            "eps": sets("optimizer.eps", number, 1e-8),
            "weight_decay": sets("optimizer.weight_decay", number, 0.0),
            "max_grad_norm": sets("optimizer.max_grad_norm", number, off=(0,)),
            "torch_adam": when_on("zero.optimizer_implementation", "torch"),
            "adam_w_mode": allowed(True, hint=CHOOSE),
        },
    },
    "scheduler": {
        "type": sets("deepspeed.schedule", rules.choice(SCHEDULES, "use WarmupDecayLR")),
        "params": {
            "warmup_min_lr": allowed(0), "warmup_max_lr": sets("optimizer.lr", number, 5e-5),
            "warmup_num_steps": sets("warmup_steps", rules.whole, 0),
            "warmup_type": allowed("linear", hint="set linear"),
            "cos_min_ratio": sets("optimizer.final_lr_ratio", number),
            "total_num_steps": sets("schedule_steps", positive),
        },
    },
    "fp16": {
        "enabled": _enabled("fp16"),
        "loss_scale": allowed(0, hint="set loss_scale: 0"),
        "initial_scale_power": sets("precision.initial_loss_scale", rules.choice(SCALES)),
        "loss_scale_window": sets("precision.loss_scale_growth_interval", positive),
    },
    "bf16 bfloat16": {
        "enabled": _enabled("bf16"),
        "bf16_master_weights_and_grads": when_on("precision.master", "bf16"),
    },
    "zero_optimization": ZERO,
    "communication_data_type": sets("precision.reduce", _dtype),
    "data_types": {
        "grad_accum_dtype": allowed("fp32"),
        "buffer_dtype": sets("precision.buffer", _dtype),
    },
    "tensor_parallel": rules.table({
        "autotp_size": sets("deepspeed.tensor", positive, off=(0,)),
        "tp": {"tp_size": rules.passes("follows autotp_size")},
        "partition_config preset_model": _own_plan,
    }),
    "sequence_parallel_size": sets("parallel.sequence", positive),
    "pipeline": rules.unsupported(
        "wrap.zero puts every block on each rank", "use wrap.fsdp with pipeline_parallel",
        blocks=True),
    "expert_parallel": rules.unsupported(
        "wrap.zero puts every expert on each rank", "use wrap.fsdp with expert_parallel",
        blocks=True),
})  # fmt: skip


def set_defaults(report: Report, *, alone: bool) -> None:
    """Add DeepSpeed 0.19's defaults; `alone` means without TrainingArguments."""
    own = "DeepSpeed's default"
    steps, scheduled = report.given("optimizer"), report.given("deepspeed.schedule")
    cosine = scheduled and report.value("deepspeed.schedule") == "cosine"
    flat = alone and steps and not scheduled
    scaled = report.value("precision.compute") == "fp16"
    for fact, value, why, holds in (
        ("optimizer.max_grad_norm", None, own, alone),
        ("optimizer.decay_all", True, "DeepSpeed decays every parameter", steps),
        ("optimizer.weight_decay", 0.0, own, steps),
        ("schedule", "flat", "DeepSpeed's default is a constant rate", flat),
        ("warmup_steps", 1000, own, scheduled),
        ("optimizer.final_lr_ratio", 1e-4, own, cosine),
        ("precision.loss_scale_growth_interval", 1000, own, scaled),
    ):
        if holds and not report.given(fact):
            report.default(fact, value, why)
