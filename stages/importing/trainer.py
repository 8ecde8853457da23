"""The fields of transformers' TrainingArguments, and the keys that scripts keep next to them."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from stages.importing import rules
from stages.importing.engines import DEEPSPEED, FSDP_PREFIXED, PARALLELISM, fsdp_strategy
from stages.importing.rules import Table, number, positive, rows, rule, sets, table
from stages.importing.trackers import TRAINER_TRACKERS, WANDB_PREFIXED

EIGHT_BITS = {"moments": "8bit"}
OPTIMIZERS: dict[str, dict[str, str]] = {
    "adamw_torch": {}, "adamw_torch_fused": {"kernel": "fused"}, "paged_adamw_32bit": {},
    **{f"{name}_8bit": EIGHT_BITS
       for name in ("adamw_torch", "adamw", "adamw_bnb", "paged_adamw")},
}  # fmt: skip
"""Fields of optimizer.adamw."""


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
        raise rules.WrongValueError(f"recipes choose layers by name !! {hint}")
    found = rules.names(value)
    return "all-linear" if found == ["all-linear"] else found


TRAINER: Table = {
    **table("""
    do_predict predict_with_generate: ignored recipes train | output_dir: output_name recipe_name
    run_name: name recipe_name | per_device_train_batch_size: train.micro_batch_size positive
    gradient_accumulation_steps: accumulation positive | num_train_epochs: train.epochs number
    max_steps: train.steps positive off=-1,0 | learning_rate: optimizer.lr number
    lr_scheduler_type: schedule linear, cosine, constant=flat, constant_with_warmup=constant, \
        cosine_with_min_lr=cosine -- set optimizer.schedule
    lr_scheduler_kwargs.min_lr_rate: optimizer.final_lr_ratio number
    lr_scheduler_kwargs.min_lr: final_lr number | lr_scheduler_kwargs.num_cycles: always 0.5
    warmup_steps: @warmup | optim: foreign optim optimizers | weight_decay: optimizer.* number
    adam_beta1: beta1 number | adam_beta2: beta2 number | adam_epsilon: optimizer.eps number
    max_grad_norm: optimizer.* max_norm | average_tokens_across_devices: always true
    label_smoothing_factor: always 0 | bf16: precision.compute = bf16
    fp16: precision.compute = fp16 | tf32: precision.* = true | use_cpu: launch.device = cpu
    seed: seed whole | data_seed: refused a recipe has one seed -- set it as seed
    activation_checkpointing gradient_checkpointing: model.activation_checkpointing = {}
    torch_compile: model.compile = {} | torch_compile_backend: model.compile.backend
    torch_compile_mode: model.compile.mode | use_liger_kernel: model.kernels = liger
    logging_steps: train.log_every positive
    eval_strategy: eval_strategy no, steps, epoch -- set train.eval_every
    save_strategy: save_strategy no, steps, epoch -- set checkpoint.every
    eval_steps: eval_steps period | save_steps: save_steps period
    save_total_limit: checkpoint.keep positive | load_best_model_at_end: checkpoint.keep_best = 1
    metric_for_best_model: always loss, eval_loss
    greater_is_better dataloader_drop_last: always false
    dataloader_num_workers: train.workers whole
    train_sampling_strategy: train.shuffle random=true, sequential=false -- use random
    ddp_bucket_cap_mb: ddp.bucket_cap_mb positive
    ddp_find_unused_parameters: ddp.find_unused_parameters truth
    ddp_static_graph: ddp.static_graph truth | fsdp: strategy fsdp off=false,,[]
    accelerator_config.split_batches: always false
    accelerator_config.gradient_accumulation_kwargs.num_steps: accumulation positive
    resume_from_checkpoint: refused a new run starts from the model -- pipe convert CHECKPOINT NEW \
        --to canonical, then checkpoint.start_from: NEW
    push_to_hub: refused publishing is a stage -- add a slot publish: {use: publish.hub, repo: \
        owner/name}
    """, warmup=_warmup, period=_steps_or_share, fsdp=fsdp_strategy,
        optimizers=OPTIMIZERS),
    "fsdp_config": FSDP_PREFIXED, "deepspeed": DEEPSPEED, "parallelism_config": PARALLELISM,
    **TRAINER_TRACKERS,
}  # fmt: skip
"""`flat` is constant from the first step, even with warm-up steps."""
DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0,
    "learning_rate": 5e-5, "lr_scheduler_type": "linear", "weight_decay": 0.0,
    "max_grad_norm": 1.0, "seed": 42, "save_strategy": "steps", "save_steps": 500,
    "eval_strategy": "no",
}  # fmt: skip
"""Defaults of TrainingArguments that differ from the recipe's."""


LORA = table("""
    lora_r: adapter.rank positive | lora_alpha: adapter.alpha number
    lora_dropout: adapter.dropout number | lora_target_modules: adapter.targets targets
    lora_target_parameters: adapter.target_parameters names
    lora_modules_to_save: adapter.train_also also | use_rslora: adapter.scaling = rslora
    use_dora: adapter.dora = true | load_in_4bit: quantize = true
    load_in_8bit: refused weights are held whole or in 4 bits -- set load_in_4bit
    bnb_4bit_use_double_quant: refused the scales of 4-bit weights stay in fp32
    bnb_4bit_quant_type: quantization nf4, fp4
""", targets=_targets,
    also=lambda value: [f"*{name}.*" for name in rules.names(value)])  # fmt: skip
SCRIPT: Table = {
    **table("""
    warmup_ratio: warmup_ratio number | evaluation_strategy: @eval_strategy
    model_name_or_path: model | model_revision: revision
    tokenizer_name tokenizer_name_or_path: model.tokenizer | attn_implementation: model.attention
    trust_remote_code: model.* truth
    torch_dtype dtype: always fp32, float32 -- set precision.master: bf16 for bf16 master weights
    train_file: data path | validation_file: data.heldout_files file
    validation_split_percentage: data.heldout_fraction percentage
    block_size max_seq_length max_length model_max_length: data.sequence_length positive
    dataset_name: dataset | dataset_config dataset_config_name: dataset.config
    dataset_train_split: dataset.split | dataset_test_split: dataset.heldout
    dataset_mixture: if .*(chosen|rejected).* then refused names rows of preferences, and \
        recipes train on text !! train with TRL else refused mixtures have another form -- write \
        data.sources, each with its weight
    dataset_text_field: always text -- rename the column | packing: data.* = true
    packing_strategy: always bfd | truncation_mode: always keep_start
    assistant_only_loss: loss.assistant truth | completion_only_loss: loss.completion truth
    loss_type: always nll, chunked_nll !! | use_peft: adapter truth
    lora_task_type: always causal_lm !! | log_with: @report_to
    """, eval_strategy=TRAINER["eval_strategy"],
        file=lambda value: [rules.path(value)], report_to=TRAINER["report_to"],
        percentage=lambda value: min(number(value) / 100, 0.5)),
    **LORA,
    **{key: WANDB_PREFIXED[key] for key in ("wandb_project", "wandb_entity", "wandb_run_group")},
}  # fmt: skip
"""Keys that may stand next to TrainingArguments in the same file: names of its earlier versions,
keys of the example scripts of transformers and TRL, and accelerate's `log_with`."""
SFT_KEYS = frozenset(rows("""
    activation_offloading assistant_only_loss chat_template_path completion_only_loss
    dataset_text_field eval_packing packing packing_strategy padding_free shuffle_dataset: TRL
"""))  # fmt: skip
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
        raise rules.WrongValueError(f"{why} -- set data.heldout_fraction")
    return found


template_setting = rule(
    "refused rows are laid out by the tokenizer's own chat template "
    "-- compare both; for another template, name a tokenizer that has it: model.tokenizer"
)
SHARED: dict[str, Any] = {
    "template_setting": template_setting,
    "named_template": rule(
        "if (?i)none|tokenizer_default then ignored rows are laid out by the tokenizer's own chat "
        "template else never rows are laid out by the tokenizer's own chat template "
        "-- compare both; for another template, name a tokenizer that has it: model.tokenizer"),
    "fraction": _fraction,
    "new_tokens": rule(
        "refused tokens come from the model's tokenizer -- save a tokenizer with them, name it in "
        "model.tokenizer, and set model.vocab_size"),
    "lora_b": lambda value: [{"match": ["*.lora_B.*"], "lr_ratio": number(value)}],
    **SCRIPT, **TRAINER,
}  # fmt: skip
"""Rules and readers that the tables of several tools name."""
