"""The keys of a torchtune recipe, and of its blocks but for data sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.importing import rules
from stages.importing.engines import FSDP, RECOMPUTE, max_norm, optimizer_rule, read_betas
from stages.importing.report import Report
from stages.importing.rules import Rule, RuleResult, Table, allowed, passes, refused, sets, truth
from stages.importing.tools import COMPONENT
from stages.importing.trackers import RECORDED, WANDB, other_tracker, own_run
from stages.importing.trainer import SCRIPT, TRAINER, named_template

_EIGHT_BITS = ("bitsandbytes.optim.adamw8bit", "bitsandbytes.optim.pagedadamw8bit",
               "torchao.optim.adamw8bit", "torchao.prototype.low_bit_optim.adamw8bit")  # fmt: skip
OPTIMIZERS: Mapping[str, dict[str, str]] = {
    "torch.optim.adamw": {},
    "bitsandbytes.optim.adamw": {},
    "bitsandbytes.optim.pagedadamw": {},
    **{name: {"moments": "8bit"} for name in _EIGHT_BITS},
}
"""Name in lower case -> fields of optimizer.adamw."""
COSINE = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
_CHECKPOINTING = "model.activation_checkpointing"
_speed = passes("changes speed or memory, no number")


def _known(names: str, why: str, hint: str, *, blocks: bool = True) -> Rule:
    """Return a rule for components that need no place in a recipe; others are refused."""
    known, own = names.split(), "every recipe does so"
    return rules.only(lambda value: str(value).lower() in known, own, why, hint, blocks=blocks)


def _compile(value: Any) -> RuleResult:
    on = value.get("model", True) if isinstance(value, Mapping) else value
    return rules.when_on("model.compile", {})(on)


def _recomputed(value: Any) -> RuleResult:
    if str(value).isdigit():
        return sets(f"{_CHECKPOINTING}.every", rules.positive)(value)
    return rules.untranslated(f"{_CHECKPOINTING} has other choices")(value)


TOP = rules.table({
    "output_dir": sets("output_name", rules.recipe_name),
    "resume_from_checkpoint": TRAINER["resume_from_checkpoint"],
    "save_adapter_weights_only": rules.when_on("export.adapter", True),
    "seed": sets("seed", rules.whole), "shuffle": sets("train.shuffle", truth),
    "batch_size": TRAINER["per_device_train_batch_size"],
    "gradient_accumulation_steps": TRAINER["gradient_accumulation_steps"],
    "epochs": TRAINER["num_train_epochs"],
    "max_steps_per_epoch": sets("cap", rules.positive, off=(-1,)),
    "clip_grad_norm": sets("optimizer.max_grad_norm", max_norm),
    "compile": _compile,
    "log_every_n_steps": TRAINER["logging_steps"],
    "run_val_every_n_steps": sets("train.eval_every", rules.positive),
    "device": sets("launch.device", rules.choice(("cpu",)), off=("cuda",)),
    "dtype": sets("precision.compute", rules.choice(
        ("fp32", "bf16", "fp16"), "use bf16", blocks=True)),
    "enable_activation_checkpointing": RECOMPUTE,
    "enable_activation_offloading": rules.when_on(f"{_CHECKPOINTING}.offload", True),
    "ac_mode": allowed("full", "selective"),
    "ac_option": _recomputed,
    "fsdp_cpu_offload": sets("fsdp.cpu_offload", truth),
    "fsdp": {"cpu_offload": sets("fsdp.cpu_offload", truth)},
    "fsdp_reshard_after_forward": FSDP["reshard_after_forward"],
    "tensor_parallel_dim": sets("parallel.tensor", rules.positive),
    "tensor_parallel_plan": passes("layers are divided by the architecture's plan"),
    "context_parallel_dim": sets("parallel.context", rules.positive),
    "data_parallel_replicate_dim": sets("parallel.replicate", rules.positive),
    "data_parallel_shard_dim": sets("parallel.shard", rules.positive, off=(-1,)),
    "collate_fn": _known(
        "torchtune.data.padded_collate_sft torchtune.data.padded_collate_packed",
        "samples are put together by data.chat and data.text", "leave it out"),
    "tokenizer": rules.table({
        "max_seq_len": SCRIPT["max_length"],
        "prompt_template": named_template,
        f"{COMPONENT} path merges_file merges_path vocab_path special_tokens_path special_tokens":
            passes("the tokenizer comes from the model's folder"),
    }),
    "checkpointer": rules.table({
        COMPONENT: _known(
            "torchtune.training.fullmodelhfcheckpointer",
            "model.hf reads the layout of Hugging Face",
            "name a folder with config.json and safetensors in model.path", blocks=False),
        "checkpoint_dir": sets("model", rules.path),
        "recipe_checkpoint adapter_checkpoint should_load_recipe_state":
            TRAINER["resume_from_checkpoint"],
        "checkpoint_files output_dir model_type safe_serialization keep_last_n_checkpoints":
            passes("the model's folder says it, or the run's"),
    }),
    "optimizer": rules.table({
        COMPONENT: optimizer_rule("optim", OPTIMIZERS),
        "lr": sets("optimizer.lr", rules.number),
        "weight_decay": sets("optimizer.weight_decay", rules.number),
        "betas": sets("betas", read_betas), "eps": sets("optimizer.eps", rules.number),
        "fused foreach capturable block_wise min_8bit_size percentile_clipping": _speed,
        "amsgrad": allowed(False),
    }),
    "lr_scheduler": {
        COMPONENT: sets("schedule", rules.choice({COSINE: "cosine"}, "set optimizer.schedule")),
        "num_warmup_steps": sets("warmup_steps", rules.whole), "num_cycles": allowed(0.5),
    },
    "loss": {
        COMPONENT: _known(
            "torchtune.modules.loss.cewithchunkedoutputloss torch.nn.crossentropyloss "
            "torchtune.modules.loss.linearcrossentropyloss",
            "the loss is the mean cross-entropy of the target tokens",
            "use CEWithChunkedOutputLoss"),
        "num_output_chunks": _speed, "ignore_index": allowed(-100),
    },
    "metric_logger": {},  # by its component, see `logger`
    "profiler": rules.untranslated("train.profile_steps names steps to record"),
    "optimizer_in_bwd custom_sharded_layers low_cpu_ram memory_efficient_fsdp_wrap "
    "cudnn_deterministic_mode enable_async_checkpointing log_peak_memory_stats log_level "
    "use_distributed_state_dict batch_size_val": _speed,
    "quantizer fake_quant_after_n_steps teacher_model teacher_checkpointer kd_ratio kd_loss "
    "ref_checkpointer ref_policy_checkpointer policy_model reward_checkpointer "
    "reward_and_value_model value_checkpointer ppo_epochs ppo_batch_size":
        rules.unsupported("no recipe trains like this", blocks=True),
})  # fmt: skip


def _asks(tracker: str) -> Rule:
    return lambda value: rules.translated("report_to", [tracker])


LOGGERS: Mapping[str, Table] = {
    "wandblogger": rules.table({
        COMPONENT: _asks("wandb"),
        **WANDB,
        "id run_id resume": own_run,
        "log_dir dir log_strategy": passes("the run has a folder"),
    }),
    "tensorboardlogger": {
        COMPONENT: _asks("tensorboard"),
        "log_dir": sets("tensorboard.folder", rules.path),
        "organize_logs": passes("each run has its own folder"),
    },
}  # fmt: skip
"""Name in lower case -> rules of its block."""


def logger(block: Mapping[str, Any]) -> Table:
    """Return the rules of the block that names a logger of metrics."""
    name = str(block.get(COMPONENT, "")).rpartition(".")[2].lower()
    if name in ("disklogger", "stdoutlogger"):
        return dict.fromkeys(block, passes(RECORDED))
    other = {**dict.fromkeys(block, passes(f"follows {COMPONENT}")), COMPONENT: other_tracker}
    return LOGGERS.get(name, other)


def strict(block: Mapping[str, Any], table: Table) -> Table:
    """Return the table with refusals of the block's other keys, which torchtune hands on."""
    other = rules.unsupported("no recipe has this argument", blocks=True)
    return {**dict.fromkeys(block, other), **table}


PACKAGE = "torchtune.models."
FAMILIES = ("code_llama2", "gemma", "gemma2", "llama2", "llama3", "llama3_1", "llama3_2",
            "llama3_3", "mistral", "phi3", "phi4", "qwen2", "qwen2_5", "qwen3")  # fmt: skip
FUSED = ("phi3", "phi4")
"""Families whose projections are one layer in the layout of Hugging Face."""
PLAIN = ("gemma", "gemma2")
"""Families whose tokenizer puts nothing around messages."""
ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
"""Layer in torchtune -> in the layout of Hugging Face."""


def family(name: Any) -> str:
    """Return the family in the name of a builder, empty if it is not torchtune's."""
    words = str(name).split(".")
    return words[2] if str(name).startswith(PACKAGE) and len(words) == 4 else ""


def _builder(value: Any) -> RuleResult:
    if family(value) not in FAMILIES or "classifier" in str(value) or "reward" in str(value):
        hint = f"the families are {', '.join(FAMILIES)}"
        return refused("is not a known language model", hint, blocks=True)
    if str(value).rpartition(".")[2].startswith(("lora_", "qlora_")):
        return rules.translated("adapter", True)
    return rules.ignored("the config.json in checkpoint_dir says it")


def _attention(value: Any) -> list[str]:
    names = rules.names(value)
    if unknown := [name for name in names if name not in ATTENTION]:
        raise rules.WrongValueError(f"{unknown[0]!r} is not a layer of attention", blocks=True)
    return [ATTENTION[name] for name in names]


MODEL = {
    COMPONENT: _builder,
    "lora_attn_modules": sets("tune.attention", _attention),
    "apply_lora_to_mlp": sets("tune.mlp", truth),
    "apply_lora_to_output": sets("tune.output", truth),
    "lora_rank": SCRIPT["lora_r"],
    **{key: SCRIPT[key] for key in ("lora_alpha", "lora_dropout", "use_dora")},
    "quantize_base": rules.when_on("quantize", True),
}
_divided = rules.unsupported(
    "torchtune has parts of what is one layer in the layout of Hugging Face",
    "set adapter.targets: qkv_proj, o_proj, gate_up_proj, ...",
)
LAYERS = ("lora_attn_modules", "apply_lora_to_mlp", "apply_lora_to_output")


def read_model(report: Report, file: str, block: Mapping[str, Any]) -> None:
    """Read the block `model`: the builder of a model, with or without LoRA."""
    name = str(block.get(COMPONENT, ""))
    builder = name.rpartition(".")[2]
    if builder.startswith("qlora_"):
        report.default("quantize", True, f"{builder} in {file}")
    fused = dict.fromkeys(LAYERS, _divided) if family(name) in FUSED else {}
    report.read(file, block, strict(block, {**MODEL, **fused}), "model.")
    report.default("adapter", False, "the model's builder has no LoRA")
    if not report.value("adapter"):
        return
    for name, value in (("rank", 8), ("alpha", 16.0), ("dropout", 0.0)):
        report.default(f"adapter.{name}", value, "torchtune's default")
    found = [*report.value("tune.attention", [])]
    found += ("gate_proj", "up_proj", "down_proj") if report.value("tune.mlp") else ()
    found += ["lm_head"] if report.value("tune.output") else []
    for fact in ("tune.attention", "tune.mlp", "tune.output"):
        report.rename(fact, "adapter.targets" if found else fact, content=found)
