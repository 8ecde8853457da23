"""The fields of transformers' TrainingArguments, and the keys that scripts keep beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.importing import rules
from stages.importing.engines import (
    DEEPSPEED,
    FSDP_PREFIXED,
    PARALLELISM,
    max_norm,
    optimizer_rule,
)
from stages.importing.fsdp_words import fsdp_strategy
from stages.importing.periods import steps_or_share
from stages.importing.rules import Table, allowed, sets, when_on
from stages.importing.trackers import TRAINER_TRACKERS, WANDB_PREFIXED

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "flat",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
}
"""`flat` is constant from the first step, even with warm-up steps."""
_EIGHT_BITS = ("adamw_torch_8bit", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
OPTIMIZERS: dict[str, dict[str, str]] = {
    "adamw_torch": {},
    "adamw_torch_fused": {"kernel": "fused"},
    "paged_adamw_32bit": {},
    **{name: {"moments": "8bit"} for name in _EIGHT_BITS},
}
"""Fields of optimizer.adamw."""
_ORDERS = {"random": True, "sequential": False}


def _warmup(value: Any) -> rules.RuleResult:
    steps = rules.number(value)
    if 0 < steps < 1:
        return rules.RuleResult(outcome="translated", fact="warmup_ratio", content=steps)
    return sets("warmup_steps", rules.whole)(value)


def _targets(value: Any) -> list[str] | str:
    if isinstance(value, str) and set(value) & set(r"\[](){}|^$*+?"):
        hint = "list the layers: q_proj, v_proj, ..."
        raise rules.WrongValueError("recipes choose layers by name", hint, blocks=True)
    found = rules.names(value)
    return "all-linear" if found == ["all-linear"] else found


_recompute = when_on("model.activation_checkpointing", {})
_STRATEGIES = ("no", "steps", "epoch")

TRAINER: Table = {
    **rules.each_way("do_predict predict_with_generate", rules.passes("recipes train")),
    "output_dir": sets("output_name", rules.recipe_name),
    "run_name": sets("name", rules.recipe_name),
    "per_device_train_batch_size": sets("train.micro_batch_size", rules.positive),
    "gradient_accumulation_steps": sets("accumulation", rules.positive),
    "num_train_epochs": sets("train.epochs", rules.number),
    "max_steps": sets("train.steps", rules.positive, off=(-1, 0)),
    "learning_rate": sets("optimizer.lr", rules.number),
    "lr_scheduler_type": sets("schedule", rules.choice(SCHEDULES, "set optimizer.schedule")),
    "lr_scheduler_kwargs": {
        "min_lr_rate": sets("optimizer.final_lr_ratio", rules.number),
        "min_lr": sets("final_lr", rules.number),
        "num_cycles": allowed(0.5),
    },
    "warmup_steps": _warmup,
    "optim": optimizer_rule("optim", OPTIMIZERS),
    "weight_decay": sets("optimizer.weight_decay", rules.number),
    "adam_beta1": sets("beta1", rules.number),
    "adam_beta2": sets("beta2", rules.number),
    "adam_epsilon": sets("optimizer.eps", rules.number),
    "max_grad_norm": sets("optimizer.max_grad_norm", max_norm),
    "average_tokens_across_devices": allowed(True),
    "label_smoothing_factor": allowed(0),
    "bf16": when_on("precision.compute", "bf16"),
    "fp16": when_on("precision.compute", "fp16"),
    "tf32": when_on("precision.tf32", True),
    "use_cpu": when_on("launch.device", "cpu"),
    "seed": sets("seed", rules.whole),
    "data_seed": rules.unsupported("a recipe has one seed", "set it as seed"),
    "activation_checkpointing": _recompute,
    "gradient_checkpointing": _recompute,
    "torch_compile": when_on("model.compile", {}),
    "torch_compile_backend": sets("model.compile.backend", str),
    "torch_compile_mode": sets("model.compile.mode", str),
    "use_liger_kernel": when_on("model.kernels", "liger"),
    "logging_steps": sets("train.log_every", rules.positive),
    "eval_strategy": sets("eval_strategy", rules.choice(_STRATEGIES, "set train.eval_every")),
    "eval_steps": sets("eval_steps", steps_or_share),
    "save_strategy": sets("save_strategy", rules.choice(_STRATEGIES, "set checkpoint.every")),
    "save_steps": sets("save_steps", steps_or_share),
    "save_total_limit": sets("checkpoint.keep", rules.positive),
    "load_best_model_at_end": when_on("checkpoint.keep_best", 1),
    "metric_for_best_model": allowed("loss", "eval_loss"),
    "greater_is_better": allowed(False),
    "dataloader_num_workers": sets("train.workers", rules.whole),
    "dataloader_drop_last": allowed(False),
    "train_sampling_strategy": sets("train.shuffle", rules.choice(_ORDERS, "use random")),
    "ddp_bucket_cap_mb": sets("ddp.bucket_cap_mb", rules.positive),
    "ddp_find_unused_parameters": sets("ddp.find_unused_parameters", rules.truth),
    "ddp_static_graph": sets("ddp.static_graph", rules.truth),
    "fsdp": sets("strategy", fsdp_strategy, off=(False, "", [])),
    "fsdp_config": FSDP_PREFIXED,
    "deepspeed": DEEPSPEED,
    "parallelism_config": PARALLELISM,
    "accelerator_config": {
        "split_batches": allowed(False),
        "gradient_accumulation_kwargs": {"num_steps": sets("accumulation", rules.positive)},
    },
    "resume_from_checkpoint": rules.unsupported(
        "a new run starts from the model",
        "pipe convert CHECKPOINT NEW --to canonical, then checkpoint.start_from: NEW",
    ),
    "push_to_hub": rules.unsupported(
        "publishing is a stage", "add a slot publish: {use: publish.hub, repo: owner/name}"
    ),
    **TRAINER_TRACKERS,
}

DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "seed": 42,
    "save_strategy": "steps",
    "save_steps": 500,
    "eval_strategy": "no",
}
"""Defaults of TrainingArguments that differ from the recipe's."""

_length = sets("data.sequence_length", rules.positive)


def _mixture(value: Any) -> rules.RuleResult:
    if "chosen" in str(value) or "rejected" in str(value):
        why = "names rows of preferences, and recipes train on text"
        return rules.refused(why, "train with TRL", blocks=True)
    why = "mixtures have another form"
    return rules.unsupported(why, "write data.sources, each with its weight")(value)


_tokenizer = sets("model.tokenizer", str)
_master = allowed("fp32", "float32", hint="set precision.master: bf16 for bf16 master weights")
SCRIPT: Table = {
    # names of earlier versions of TrainingArguments
    "warmup_ratio": sets("warmup_ratio", rules.number),
    "evaluation_strategy": TRAINER["eval_strategy"],
    # keys of the example scripts of transformers and TRL
    "model_name_or_path": sets("model", str),
    "model_revision": sets("revision", str),
    **dict.fromkeys(("tokenizer_name", "tokenizer_name_or_path"), _tokenizer),
    "attn_implementation": sets("model.attention", str),
    "trust_remote_code": sets("model.trust_remote_code", rules.truth),
    **dict.fromkeys(("torch_dtype", "dtype"), _master),
    "train_file": sets("data", rules.path),
    "validation_file": sets("data.heldout_files", lambda value: [rules.path(value)]),
    "validation_split_percentage": sets(
        "data.heldout_fraction", lambda value: min(rules.number(value) / 100, 0.5)
    ),
    **dict.fromkeys(("block_size", "max_seq_length", "max_length", "model_max_length"), _length),
    "dataset_name": sets("dataset", str),
    **dict.fromkeys(("dataset_config", "dataset_config_name"), sets("dataset.config", str)),
    "dataset_train_split": sets("dataset.split", str),
    "dataset_test_split": sets("dataset.heldout", str),
    "dataset_mixture": _mixture,
    "dataset_text_field": allowed("text", hint="rename the column"),
    "packing": when_on("data.packing", True),
    "packing_strategy": allowed("bfd"),
    "truncation_mode": allowed("keep_start"),
    "assistant_only_loss": sets("loss.assistant", rules.truth),
    "completion_only_loss": sets("loss.completion", rules.truth),
    "loss_type": allowed("nll", "chunked_nll", blocks=True),
    "use_peft": sets("adapter", rules.truth),
    "lora_r": sets("adapter.rank", rules.positive),
    "lora_alpha": sets("adapter.alpha", rules.number),
    "lora_dropout": sets("adapter.dropout", rules.number),
    "lora_target_modules": sets("adapter.targets", _targets),
    "lora_target_parameters": sets("adapter.target_parameters", rules.names),
    "lora_modules_to_save": sets(
        "adapter.train_also", lambda value: [f"*{name}.*" for name in rules.names(value)]
    ),
    "lora_task_type": allowed("causal_lm", blocks=True),
    "use_rslora": when_on("adapter.scaling", "rslora"),
    "use_dora": when_on("adapter.dora", True),
    "load_in_4bit": when_on("quantize", True),
    "load_in_8bit": rules.unsupported("weights are held whole or in 4 bits", "set load_in_4bit"),
    "bnb_4bit_use_double_quant": rules.unsupported("the scales of 4-bit weights stay in fp32"),
    "bnb_4bit_quant_type": sets("quantization", rules.choice(("nf4", "fp4"))),
    "log_with": TRAINER_TRACKERS["report_to"],  # accelerate's
    **{key: WANDB_PREFIXED[key] for key in ("wandb_project", "wandb_entity", "wandb_run_group")},
}
"""Keys that may stand beside TrainingArguments in the same file."""

SFT_KEYS = frozenset(
    {
        "activation_offloading", "assistant_only_loss", "chat_template_path",
        "completion_only_loss", "dataset_text_field", "eval_packing", "packing",
        "packing_strategy", "padding_free", "shuffle_dataset",
    }
)  # fmt: skip
"""Keys that only TRL's SFTConfig has."""
SFT_DEFAULTS: Mapping[str, Any] = {
    "learning_rate": 2e-5, "bf16": True, "gradient_checkpointing": True, "logging_steps": 10,
}  # fmt: skip
"""Defaults of SFTConfig (TRL 1.16) that differ from those of TrainingArguments."""

TRAINER_ALL: Table = {**TRAINER, **SCRIPT}
