"""The fields of transformers' TrainingArguments, and the keys that scripts keep next to them."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from stages.importing import rules
from stages.importing.engines import (
    DEEPSPEED,
    FSDP_PREFIXED,
    PARALLELISM,
    RECOMPUTE,
    fsdp_strategy,
    max_norm,
    optimizer_rule,
)
from stages.importing.rules import Table, allowed, number, positive, sets, truth, when_on
from stages.importing.trackers import TRAINER_TRACKERS, WANDB_PREFIXED

SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "flat", "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
}  # fmt: skip
"""`flat` is constant from the first step, even with warm-up steps."""
_EIGHT_BITS = ("adamw_torch_8bit", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
OPTIMIZERS: dict[str, dict[str, str]] = {
    "adamw_torch": {},
    "adamw_torch_fused": {"kernel": "fused"},
    "paged_adamw_32bit": {},
    **{name: {"moments": "8bit"} for name in _EIGHT_BITS},
}
"""Fields of optimizer.adamw."""
_WHEN = ("no", "steps", "epoch")


def _warmup(value: Any) -> rules.RuleResult:
    if 0 < number(value) < 1:
        return rules.translated("warmup_ratio", number(value))
    return sets("warmup_steps", rules.whole)(value)


def _steps_or_share(value: Any) -> int | Fraction:
    """Return a number of steps, or below 1 the share of the training that is meant."""
    found = number(value)
    return Fraction(str(found)) if 0 < found < 1 else positive(value)


def _targets(value: Any) -> list[str] | str:
    if isinstance(value, str) and set(value) & set(r"\[](){}|^$*+?"):
        hint = "list the layers: q_proj, v_proj, ..."
        raise rules.WrongValueError("recipes choose layers by name", hint, blocks=True)
    found = rules.names(value)
    return "all-linear" if found == ["all-linear"] else found


def also(value: Any) -> list[str]:
    """Return the patterns of modules that are trained as a whole next to an adapter."""
    return [f"*{name}.*" for name in rules.names(value)]


TRAINER = rules.table({
    "do_predict predict_with_generate": rules.passes("recipes train"),
    "output_dir": sets("output_name", rules.recipe_name),
    "run_name": sets("name", rules.recipe_name),
    "per_device_train_batch_size": sets("train.micro_batch_size", positive),
    "gradient_accumulation_steps": sets("accumulation", positive),
    "num_train_epochs": sets("train.epochs", number),
    "max_steps": sets("train.steps", positive, off=(-1, 0)),
    "learning_rate": sets("optimizer.lr", number),
    "lr_scheduler_type": sets("schedule", rules.choice(SCHEDULES, "set optimizer.schedule")),
    "lr_scheduler_kwargs": {
        "min_lr_rate": sets("optimizer.final_lr_ratio", number), "min_lr": sets("final_lr", number),
        "num_cycles": allowed(0.5),
    },
    "warmup_steps": _warmup,
    "optim": optimizer_rule("optim", OPTIMIZERS),
    "weight_decay": sets("optimizer.weight_decay", number),
    "adam_beta1": sets("beta1", number), "adam_beta2": sets("beta2", number),
    "adam_epsilon": sets("optimizer.eps", number),
    "max_grad_norm": sets("optimizer.max_grad_norm", max_norm),
    "average_tokens_across_devices": allowed(True), "label_smoothing_factor": allowed(0),
    "bf16": when_on("precision.compute", "bf16"), "fp16": when_on("precision.compute", "fp16"),
    "tf32": when_on("precision.tf32", True), "use_cpu": when_on("launch.device", "cpu"),
    "seed": sets("seed", rules.whole),
    "data_seed": rules.unsupported("a recipe has one seed", "set it as seed"),
    "activation_checkpointing gradient_checkpointing": RECOMPUTE,
    "torch_compile": when_on("model.compile", {}),
    "torch_compile_backend": sets("model.compile.backend"),
    "torch_compile_mode": sets("model.compile.mode"),
    "use_liger_kernel": when_on("model.kernels", "liger"),
    "logging_steps": sets("train.log_every", positive),
    "eval_strategy": sets("eval_strategy", rules.choice(_WHEN, "set train.eval_every")),
    "eval_steps": sets("eval_steps", _steps_or_share),
    "save_strategy": sets("save_strategy", rules.choice(_WHEN, "set checkpoint.every")),
    "save_steps": sets("save_steps", _steps_or_share),
    "save_total_limit": sets("checkpoint.keep", positive),
    "load_best_model_at_end": when_on("checkpoint.keep_best", 1),
    "metric_for_best_model": allowed("loss", "eval_loss"),
    "greater_is_better dataloader_drop_last": allowed(False),
    "dataloader_num_workers": sets("train.workers", rules.whole),
    "train_sampling_strategy": sets(
        "train.shuffle", rules.choice({"random": True, "sequential": False}, "use random")),
    "ddp_bucket_cap_mb": sets("ddp.bucket_cap_mb", positive),
    "ddp_find_unused_parameters": sets("ddp.find_unused_parameters", truth),
    "ddp_static_graph": sets("ddp.static_graph", truth),
    "fsdp": sets("strategy", fsdp_strategy, off=(False, "", [])),
    "fsdp_config": FSDP_PREFIXED,
    "deepspeed": DEEPSPEED,
    "parallelism_config": PARALLELISM,
    "accelerator_config": {
        "split_batches": allowed(False),
        "gradient_accumulation_kwargs": {"num_steps": sets("accumulation", positive)},
    },
    "resume_from_checkpoint": rules.unsupported(
        "a new run starts from the model",
        "pipe convert CHECKPOINT NEW --to canonical, then checkpoint.start_from: NEW"),
    "push_to_hub": rules.unsupported(
        "publishing is a stage", "add a slot publish: {use: publish.hub, repo: owner/name}"),
    **TRAINER_TRACKERS,
})  # fmt: skip
DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0,
    "learning_rate": 5e-5, "lr_scheduler_type": "linear", "weight_decay": 0.0,
    "max_grad_norm": 1.0, "seed": 42, "save_strategy": "steps", "save_steps": 500,
    "eval_strategy": "no",
}  # fmt: skip
"""Defaults of TrainingArguments that differ from the recipe's."""


def _mixture(value: Any) -> rules.RuleResult:
    if "chosen" in str(value) or "rejected" in str(value):
        why = "names rows of preferences, and recipes train on text"
        return rules.refused(why, "train with TRL", blocks=True)
    why = "mixtures have another form"
    return rules.unsupported(why, "write data.sources, each with its weight")(value)


SCRIPT = rules.table({
    # names of earlier versions of TrainingArguments
    "warmup_ratio": sets("warmup_ratio", number),
    "evaluation_strategy": TRAINER["eval_strategy"],
    # keys of the example scripts of transformers and TRL
    "model_name_or_path": sets("model"), "model_revision": sets("revision"),
    "tokenizer_name tokenizer_name_or_path": sets("model.tokenizer"),
    "attn_implementation": sets("model.attention"),
    "trust_remote_code": sets("model.trust_remote_code", truth),
    "torch_dtype dtype": allowed(
        "fp32", "float32", hint="set precision.master: bf16 for bf16 master weights"),
    "train_file": sets("data", rules.path),
    "validation_file": sets("data.heldout_files", lambda value: [rules.path(value)]),
    "validation_split_percentage": sets(
        "data.heldout_fraction", lambda value: min(number(value) / 100, 0.5)),
    "block_size max_seq_length max_length model_max_length": sets("data.sequence_length", positive),
    "dataset_name": sets("dataset"), "dataset_config dataset_config_name": sets("dataset.config"),
    "dataset_train_split": sets("dataset.split"), "dataset_test_split": sets("dataset.heldout"),
    "dataset_mixture": _mixture,
    "dataset_text_field": allowed("text", hint="rename the column"),
    "packing": when_on("data.packing", True), "packing_strategy": allowed("bfd"),
    "truncation_mode": allowed("keep_start"),
    "assistant_only_loss": sets("loss.assistant", truth),
    "completion_only_loss": sets("loss.completion", truth),
    "loss_type": allowed("nll", "chunked_nll", blocks=True),
    "use_peft": sets("adapter", truth),
    "lora_r": sets("adapter.rank", positive),
    "lora_alpha": sets("adapter.alpha", number), "lora_dropout": sets("adapter.dropout", number),
    "lora_target_modules": sets("adapter.targets", _targets),
    "lora_target_parameters": sets("adapter.target_parameters", rules.names),
    "lora_modules_to_save": sets("adapter.train_also", also),
    "lora_task_type": allowed("causal_lm", blocks=True),
    "use_rslora": when_on("adapter.scaling", "rslora"), "use_dora": when_on("adapter.dora", True),
    "load_in_4bit": when_on("quantize", True),
    "load_in_8bit": rules.unsupported("weights are held whole or in 4 bits", "set load_in_4bit"),
    "bnb_4bit_use_double_quant": rules.unsupported("the scales of 4-bit weights stay in fp32"),
    "bnb_4bit_quant_type": sets("quantization", rules.choice(("nf4", "fp4"))),
    "log_with": TRAINER_TRACKERS["report_to"],  # accelerate's
    **{key: WANDB_PREFIXED[key] for key in ("wandb_project", "wandb_entity", "wandb_run_group")},
})  # fmt: skip
"""Keys that may stand next to TrainingArguments in the same file."""
SFT_KEYS = frozenset({
    "activation_offloading", "assistant_only_loss", "chat_template_path", "completion_only_loss",
    "dataset_text_field", "eval_packing", "packing", "packing_strategy", "padding_free",
    "shuffle_dataset",
})  # fmt: skip
"""Keys that only TRL's SFTConfig has."""
SFT_DEFAULTS: Mapping[str, Any] = {
    "learning_rate": 2e-5, "bf16": True, "gradient_checkpointing": True, "logging_steps": 10,
}  # fmt: skip
"""Defaults of SFTConfig (TRL 1.16) that differ from those of TrainingArguments."""
TRAINER_ALL: Table = {**TRAINER, **SCRIPT}


def _fraction(value: Any) -> float:
    found = number(value)
    if not 0 < found <= 0.5:
        why = f"holds out {value!r}, and a recipe a share of the rows of at most 0.5"
        raise rules.WrongValueError(why, "set data.heldout_fraction")
    return found


_TEMPLATE = (
    "rows are laid out by the tokenizer's own chat template",
    "compare both; for another template, name a tokenizer that has it: model.tokenizer",
)
template_setting = rules.unsupported(*_TEMPLATE)
named_template = rules.only(
    lambda value: str(value).lower() in ("none", "tokenizer_default"), _TEMPLATE[0], *_TEMPLATE
)
held_out = sets("data.heldout_fraction", _fraction, off=(0, "0", "0.0"))
"""Rule for the share of the rows that is held out, of at most a half; 0 means none."""
new_tokens = rules.unsupported(
    "tokens come from the model's tokenizer",
    "save a tokenizer with them, name it in model.tokenizer, and set model.vocab_size",
)
LORA_PLUS: Table = {
    "loraplus_lr_ratio": sets(
        "optimizer.groups", lambda value: [{"match": ["*.lora_B.*"], "lr_ratio": number(value)}]
    ),
    "loraplus_lr_embedding": rules.passes("no embedding has an adapter"),
}
