"""The fields of TrainingArguments that a recipe need not say, those it cannot, and older names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.importing import rules
from stages.importing.rules import Rule, Table, covered, never, only, says, switched
from stages.importing.trainer import TRAINER


def _all(rule: Rule, *names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, rule)


_log = covered("the log is on screen, in logs/ and in metrics.jsonl")
_eval = covered("evaluation is of the held-out loss alone")
_loader = covered("the data slot makes the batches")
_hub = covered("the publish slot uploads the export once, at the end")
_said = covered("the recipe's slots say what is done")
_ddp = covered("ranks have the same buffers from the start; the device decides the backend")
_none = "the recipe has no field for it"
_integrations = only(
    *("none", "", [], ["none"]), why="is none",
    otherwise="metrics are written to metrics.jsonl alone", hint="read them from there",
)  # fmt: skip
_off = never(_none, "leave it out")

OTHER: Table = {
    **_all(
        _log,
        *("logging_strategy", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter"),
        *("log_level", "log_level_replica", "disable_tqdm", "include_num_input_tokens_seen"),
        *("skip_memory_metrics", "logging_dir", "include_tokens_per_second"),
    ),
    **_all(
        _eval,
        *("per_device_eval_batch_size", "prediction_loss_only", "eval_do_concat_batches"),
        *("eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics"),
        *("batch_eval_metrics", "bf16_full_eval", "fp16_full_eval"),
        *("include_inputs_for_metrics", "per_gpu_eval_batch_size"),
    ),
    **_all(
        _loader,
        *("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
        *("dataloader_multiprocessing_context", "dataloader_in_order", "remove_unused_columns"),
        *("label_names", "length_column_name"),
    ),
    **_all(
        _hub,
        *("hub_strategy", "hub_always_push", "push_to_hub_model_id", "push_to_hub_organization"),
        *("push_to_hub_token",),
    ),
    **_all(_said, "do_train", "do_eval", "overwrite_output_dir"),
    **_all(_ddp, "ddp_broadcast_buffers", "ddp_backend", "ddp_timeout"),
    **_all(
        covered("belongs to a tracker that is not used"),
        *("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    ),
    **_all(
        covered("checkpoints are whole, and committed, on every machine"),
        *("save_on_each_node", "restore_callback_states_from_checkpoint", "save_safetensors"),
    ),
    "torchdynamo": covered("is an older name of torch_compile_backend"),
    "local_rank": covered("the launcher says it"),
    "use_cache": never("training keeps no cache", "leave it out"),
    "liger_kernel_config": covered("belongs to use_liger_kernel"),
    "torch_compile": switched("compiled"),
    "torch_compile_backend": says("compile_backend", rules.text),
    "torch_compile_mode": says("compile_mode", rules.text),
    "use_liger_kernel": switched("liger"),
    "neftune_noise_alpha": _off,
    "torch_empty_cache_steps": _off,
    "auto_find_batch_size": never("batches do not change by themselves", "set micro_batch_size"),
    "tf32": never("torch's own precision of matrix products is used", "use bf16"),
    "full_determinism": never("torch chooses its kernels", "leave it out"),
    "report_to": _integrations,
    "eval_delay": only(0, 0.0, why="is 0", otherwise=_none, hint="leave it out"),
    "eval_on_start": only(False, why="is off", otherwise=_none, hint="leave it out"),
    "save_only_model": only(
        False, why="is off", otherwise="checkpoints hold all that a resume needs",
        hint="leave it out; the export is of weights alone",
    ),
    "enable_jit_checkpoint": only(
        False, why="is off", otherwise="a run that is stopped goes on from its newest checkpoint",
        hint="set checkpoint.every",
    ),
    "ignore_data_skip": only(
        False, why="is off", otherwise="a resumed training takes the samples that come next"
    ),
    "accelerator_config": {
        "split_batches": only(
            False, why="is off", otherwise="batch sizes are of one process", hint="set it false"
        ),
        "dispatch_batches": covered("every process reads its own samples"),
        "even_batches": covered("no sample is taken twice"),
        "use_seedable_sampler": covered("the order is a function of seed, epoch and position"),
        "non_blocking": covered("batches are copied without waiting"),
        "gradient_accumulation_kwargs": {
            "num_steps": says("accumulation", rules.positive),
            "adjust_scheduler": covered("schedules count optimizer steps"),
            "sync_with_dataloader": covered("schedules count optimizer steps"),
            "sync_each_batch": covered("changes when gradients travel, and no number"),
        },
        "use_configured_state": covered("processes are started by the recipe"),
    },
    "debug": never("there are no debugging aids of transformers here", "leave it out"),
    "do_predict": never("nothing is predicted", "use the export"),
    "resume_from_checkpoint": never(
        "a new run starts from the model",
        "pipe convert CHECKPOINT NEW --to canonical, then checkpoint.start_from: NEW",
    ),
}  # fmt: skip

OLDER: Table = {
    "warmup_ratio": says("warmup_ratio", rules.number),
    "evaluation_strategy": TRAINER["eval_strategy"],
    "per_gpu_train_batch_size": TRAINER["per_device_train_batch_size"],
    "no_cuda": TRAINER["use_cpu"],
    "hub_repo": TRAINER["hub_model_id"],
    "group_by_length": never("samples are shuffled without regard to length", "leave it out"),
    "adafactor": never("there is no such optimizer here", "choose another optimizer stage"),
    "fsdp_min_num_params": says("fsdp.unit_size", rules.positive),
    "fsdp_transformer_layer_cls_to_wrap": says("fsdp.classes", rules.names),
    **_all(
        covered("transformers itself has given it up"),
        *(
            "fp16_opt_level",
            "fp16_backend",
            "half_precision_backend",
            "past_index",
            "mp_parameters",
        ),
        *("tpu_num_cores", "tpu_metrics_debug", "use_mps_device", "use_ipex", "jit_mode_eval"),
        *("ray_scope", "dispatch_batches", "split_batches", "sharded_ddp", "xpu_backend"),
    ),
}
"""Names of earlier versions, which files still hold."""

_four_bits = covered("follows from precision.compute")
SCRIPT: Table = {
    "model_name_or_path": says("model", rules.text),
    "model_revision": says("revision", rules.text),
    "tokenizer_name": says("tokenizer", rules.text),
    "tokenizer_name_or_path": says("tokenizer", rules.text),
    "attn_implementation": says("attention", rules.text),
    "trust_remote_code": says("trust_remote_code", rules.truth),
    "train_file": says("data", rules.path),
    "validation_file": says("heldout", rules.path),
    "validation_split_percentage": says(
        "heldout_fraction", lambda value: rules.number(value) / 100
    ),
    **_all(
        says("sequence_length", rules.positive),
        *("block_size", "max_seq_length", "max_length", "model_max_length"),
    ),
    "dataset_name": says("dataset", rules.text),
    "dataset_config": says("dataset.config", rules.text),
    "dataset_config_name": says("dataset.config", rules.text),
    "dataset_train_split": says("dataset.split", rules.text),
    "dataset_test_split": says("dataset.heldout", rules.text),
    **_all(
        never("mixtures are said otherwise", "write data.sources, each with its weight"),
        *("dataset_mixture", "dataset_mixer", "dataset_splits"),
    ),
    **_all(
        covered("the data slot tokenises, once, and keeps the tokens"),
        *("preprocessing_num_workers", "dataset_num_proc", "overwrite_cache", "use_fast_tokenizer"),
        *("low_cpu_mem_usage", "cache_dir", "keep_linebreaks"),
    ),
    **_all(
        only(
            *("auto", "float32", "fp32"), why="masters are fp32",
            otherwise="masters are fp32: in bf16, small updates are lost to rounding",
            hint="set precision.master: bf16 to have it so",
        ),
        *("torch_dtype", "dtype"),
    ),
    "use_peft": says("adapter", rules.truth),
    "lora_r": says("adapter.rank", rules.positive),
    "lora_alpha": says("adapter.alpha", rules.number),
    "lora_dropout": says("adapter.dropout", rules.number),
    "lora_target_modules": says("adapter.targets", rules.names),
    "lora_modules_to_save": says("adapter.modules", rules.names),
    "lora_target_parameters": never("linear layers get updates", "leave it out"),
    "lora_task_type": only(
        "CAUSAL_LM", why="is so", otherwise="a causal language model is trained", blocks=True
    ),
    "use_rslora": switched("adapter.rslora"),
    "use_dora": switched("adapter.dora"),
    "load_in_4bit": switched("adapter.four_bits"),
    "load_in_8bit": only(
        False, why="is off", otherwise="weights are held whole or in 4 bits",
        hint="set load_in_4bit",
    ),
    "bnb_4bit_quant_type": says("adapter.kind", rules.choice({"nf4": "nf4", "fp4": "fp4"})),
    "use_bnb_nested_quant": only(
        False, why="is off", otherwise="scales stay fp32, which is half a bit a weight",
        hint="set it false",
    ),
    "bnb_4bit_quant_storage": covered("strategies shard bytes as they are"),
    "bnb_4bit_compute_dtype": _four_bits,
    **_all(
        never("the tokenizer has it", "save it with the tokenizer"),
        *("chat_template", "chat_template_path", "eos_token"),
    ),
    "packing": switched("packing"),
    **_all(
        never("tokens are kept on disk", "use data.stream for more than a disk holds"),
        *("streaming", "dataset_streaming"),
    ),
    "assistant_only_loss": says("loss.assistant", rules.truth),
    "completion_only_loss": says("loss.completion", rules.truth),
    "loss_type": only(
        *("nll", "chunked_nll"), why="is so", otherwise="the loss is that of the next token",
        blocks=True,
    ),
    "dataset_text_field": only(
        "text", why="is so", otherwise="a row's text is called `text`", hint="rename the column"
    ),
    "packing_strategy": only(
        "bfd", why="samples are packed by best fit", otherwise="a row that is too long is cut, "
        "not split", hint="split long rows, or use data.text, which splits all",
    ),
    "truncation_mode": only("keep_start", why="is so", otherwise="the start of a row is kept"),
    **_all(
        covered("padding is neither computed with nor trained on"),
        *("padding_free", "pad_to_multiple_of", "pad_token"),
    ),
    "eval_packing": covered("what is held out is packed as the rest is, with the same loss"),
    "shuffle_dataset": covered("the order of samples is the train slot's: shuffle"),
    "activation_offloading": never(
        "is the model's to say", "set model.activation_checkpointing.offload"
    ),
    "model_init_kwargs": never("the model slot has its own fields"),
    "dataset_kwargs": never("the data slot has its own fields"),
    "router_aux_loss_coef": never("the loss has no term for routers", "leave it out"),
    "ignore_bias_buffers": covered("buffers are the same on all ranks"),
    **_all(
        never("all samples are taken", "make smaller files"),
        *("max_train_samples", "max_eval_samples"),
    ),
    **_all(
        never("weights come from a model that is there", "use config and init: random of model.hf"),
        *("config_name", "config_overrides", "model_type"),
    ),
    **_all(never("secrets do not belong into a recipe", "set HF_TOKEN"), "token", "use_auth_token"),
}  # fmt: skip
"""What transformers' and TRL's example scripts read from the same file."""

SFT_KEYS = frozenset(
    {
        "activation_offloading", "assistant_only_loss", "chat_template_path",
        "completion_only_loss", "dataset_text_field", "eval_packing", "packing",
        "packing_strategy", "padding_free", "shuffle_dataset",
    }
)  # fmt: skip
"""Keys of TRL's SFTConfig alone."""
SFT_DEFAULTS: Mapping[str, tuple[str, Any]] = {
    "learning_rate": ("lr", 2e-5),
    "bf16": ("compute", "bf16"),
    "gradient_checkpointing": ("recompute", True),
    "logging_steps": ("log_every", 10),
}
"""Key -> fact and value where SFTConfig's default is not that of TrainingArguments (TRL 1.16)."""

TRAINER_ALL: Table = {**TRAINER, **OTHER, **OLDER, **SCRIPT}
