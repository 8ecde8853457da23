"""The keys of an axolotl recipe."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from stages.importing import rules
from stages.importing.engines import FP8, FSDP_PREFIXED, RECOMPUTE, optimizer_rule
from stages.importing.rules import (
    Rule,
    RuleResult,
    Table,
    allowed,
    passes,
    positive,
    sets,
    truth,
    unsupported,
    when_on,
)
from stages.importing.trackers import MLFLOW, SWANLAB, WANDB_PREFIXED, other_tracker, text
from stages.importing.trainer import (
    LORA_PLUS,
    OPTIMIZERS,
    SCRIPT,
    TRAINER,
    held_out,
    named_template,
    new_tokens,
    template_setting,
)
from stages.importing.training import part_of_epoch

PLUGINS = (
    "axolotl.integrations.liger.LigerPlugin",
    "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin",
    "axolotl.integrations.kernels.KernelsPlugin",
    "axolotl.integrations.swanlab.SwanLabPlugin",
)
"""Plugins that change nothing that is trained: kernels, which have keys of their own, and
trackers."""


def _plugins(value: object) -> RuleResult:
    if unknown := [name for name in rules.names(value) if name not in PLUGINS]:
        why = f"{', '.join(unknown)} may change the training"
        return rules.refused(why, "leave it out, if it does not", blocks=True)
    return rules.ignored("these plugins change nothing that is trained")


_preferences = unsupported(
    "training on preferences or rewards is not supported by recipes", "train with TRL", blocks=True
)
METHODS = rules.table({
    "rl reward_model process_reward_model center_rewards_coefficient num_labels trl ebft vllm "
    "dpo_beta dpo_label_smoothing dpo_loss_type dpo_loss_weights dpo_use_weighting "
    "precompute_ref_log_probs rl_beta rpo_alpha orpo_alpha simpo_gamma cpo_alpha "
    "kto_desirable_weight kto_undesirable_weight max_prompt_len": _preferences,
    "gptq jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps "
    "lisa_n_layers lisa_step_interval qat relora trainer_cls unfrozen_parameters use_pose "
    "use_onebitllms noisy_embedding_alpha scaling_softmax llama4_linearized_experts":
        unsupported("no recipe trains like this", blocks=True),
    "relora_prune_method": passes("follows relora"),
    "lisa_layers_attribute": passes("follows lisa_n_layers"),
    "pose_split_on_token_ids pose_max_context_len pose_num_chunks": passes("follows use_pose"),
    "use_eaft": unsupported("the loss is the mean cross-entropy of the target tokens", blocks=True),
    "eaft_alpha eaft_k": passes("follows use_eaft"),
    "processor_type image_size is_multimodal freeze_mm_modules":
        unsupported("recipes train on text only", blocks=True),
    "image_resize_algorithm processor_kwargs": passes("follows processor_type"),
    "plugins": _plugins,
    "quantization": rules.untranslated("`axolotl quantize` reads it, training does not"),
    "embedding_lr embedding_lr_scale lr_groups adam_beta3 adam_epsilon2 cosine_constant_lr_ratio "
    "lr_quadratic_warmup lr_div_factor": unsupported(
        "no optimizer of a recipe has it", "leave it out, or set optimizer.groups"),
})  # fmt: skip
"""Keys that train something else than a language model on its text, or otherwise."""
HARMLESS = rules.table({
    "strict dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory "
    "num_dataset_shards_to_save hf_use_auth_token is_preprocess preprocess_iterable "
    "total_num_tokens total_supervised_tokens axolotl_config_path is_falcon_derived_model "
    "is_llama_derived_model is_mistral_derived_model is_qwen_derived_model tokenizer_use_fast "
    "tokenizer_type tokenizer_legacy tokenizer_save_jinja_files shuffle_merged_datasets "
    "shuffle_before_merging_datasets merge_lora merge_method include_tkps "
    "include_tokens_per_second mean_resizing_embeddings profiler_steps_start generate_samples "
    "num_generation_samples torchdistx_path gradio_title gradio_share gradio_server_name "
    "gradio_server_port gradio_max_new_tokens gradio_temperature": passes(),
    "ddp device device_map world_size max_memory gpu_memory_limit":
        passes("the launcher places processes"),
    "sample_packing_group_size sample_packing_bin_size sample_packing_sequentially "
    "sample_packing_mp_start_method sample_packing_eff_est multipack_real_batches "
    "pad_to_multiple_of batch_flattening streaming streaming_multipack_buffer_size "
    "pretrain_multipack_buffer_size pretraining_sample_concatenation flash_attn_cross_entropy "
    "flash_attn_fuse_mlp flash_attn_rms_norm flash_optimum flex_attn_compile_kwargs "
    "fused_attn_kernel sdpa_varlen lora_mlp_kernel lora_qkv_kernel lora_o_kernel "
    "lora_embedding_kernel lora_on_cpu qlora_sharded_model_loading embeddings_skip_upcast "
    "chunked_cross_entropy chunked_cross_entropy_num_chunks liger_fused_linear_cross_entropy "
    "liger_cross_entropy liger_rms_norm_gated cut_cross_entropy use_scattermoe use_sonicmoe "
    "tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp heads_k_stride ring_attn_func "
    "use_kernels experts_implementation experimental_skip_move_to_device deepcompile gc_steps "
    "gc_collect_steps torch_empty_cache_steps layer_offloading fsdp_final_state_dict_type "
    "torch_compile_options": passes("changes speed or memory, no number"),
    "auto_resume_from_checkpoints": passes("`pipe resume` continues a run"),
    **SWANLAB,
    "use_comet comet_workspace comet_project_name comet_experiment_key comet_mode comet_online "
    "comet_experiment_config use_otel_metrics otel_metrics_host otel_metrics_port": other_tracker,
})  # fmt: skip
"""Keys that change nothing that is trained, and those of other trackers."""

ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4",
             "flex_attention")  # fmt: skip
FLAGS = {
    "flash_attention": "flash_attention_2", "sdp_attention": "sdpa",
    "flex_attention": "flex_attention", "eager_attention": "eager",
}  # fmt: skip
"""Earlier keys for attention -> implementation."""
_CHECKPOINTING = "model.activation_checkpointing"
_offload = sets(f"{_CHECKPOINTING}.offload", lambda _: True, off=(False,))


def _attention(value: Any) -> str:
    """Return an implementation that a recipe has, or a kernel of the hub."""
    found = str(value)
    if "/" not in found:
        rules.choice(ATTENTION, "use flash_attention_2 or sdpa")(found)
    return found


def _selective(value: Any) -> RuleResult:
    if value in (True, {"save": ["attention"]}):
        return rules.translated(f"{_CHECKPOINTING}.keep", "attention")
    return rules.untranslated(f"{_CHECKPOINTING} has other choices")(value)


def _also(rule: Rule, *words: str) -> Rule:
    """Return a rule for a switch that some words turn on: recipes do not look at the GPU, and have
    no autocast."""
    return lambda value: rule(True if value in words else value)


MODEL = rules.table({
    "base_model base_model_config": SCRIPT["model_name_or_path"],
    "model_revision revision_of_model": SCRIPT["model_revision"],
    "tokenizer_config": SCRIPT["tokenizer_name"],
    "model_type type_of_model": rules.only(
        lambda value: str(value).endswith("ForCausalLM"), "every model is a causal language model",
        "recipes train causal language models", blocks=True),
    "trust_remote_code": SCRIPT["trust_remote_code"],
    "reinit_weights": when_on("model.init", "random"),
    "model_config overrides_of_model_config model_kwargs overrides_of_model_kwargs rope_scaling "
    "model_quantization_config": unsupported(
        "the model is as its config says", "change the model's config.json"),
    "special_tokens": rules.table({
        "pad_token": passes(),
        "bos_token eos_token unk_token additional_special_tokens": new_tokens}),
    "tokens added_tokens_overrides resize_token_embeddings_to_32x shrink_embeddings "
    "fix_untrained_tokens tokenizer_use_mistral_common": new_tokens,
    "attn_implementation": sets("model.attention", _attention),
    **{flag: when_on("model.attention", name) for flag, name in FLAGS.items()},
    "xformers_attention sage_attention": unsupported(
        "recipes do not have this kernel", "set attn_implementation"),
    "gradient_checkpointing": lambda value: (
        _offload(value) if str(value).startswith("offload") else RECOMPUTE(value)),
    "activation_offloading": _offload,
    "selective_checkpointing": _selective,
    "liger_rope liger_rms_norm liger_layer_norm liger_glu_activation":
        when_on("model.kernels", "liger"),
})  # fmt: skip
ADAPTER = rules.table({
    "adapter": sets("adapter", rules.choice(
        {"lora": True, "qlora": True}, "use lora or qlora", blocks=True), off=("",)),
    **{key: SCRIPT[key] for key in SCRIPT if key.startswith("lora_") and key != "lora_task_type"},
    "lora_target_linear": when_on("adapter.targets", "all-linear"),
    "lora_fan_in_fan_out": allowed(False),
    "lora_model_dir": sets("adapter.start_from", rules.path, off=("",)),
    "peft_use_rslora": SCRIPT["use_rslora"], "peft_use_dora": SCRIPT["use_dora"],
    "peft_init_lora_weights peft_autocast_adapter_dtype": allowed(True),
    **{key: SCRIPT[key] for key in ("load_in_4bit", "load_in_8bit")},
    "bnb_config_kwargs": {
        key: SCRIPT[key] for key in ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant")},
    **LORA_PLUS,
})  # fmt: skip
DATA = rules.table({
    "sequence_len": SCRIPT["max_length"],
    "excess_length_strategy": sets("data.too_long", rules.choice(
        {"drop": "drop", "truncate": "truncate", "raise": "error"})),
    "sample_packing": SCRIPT["packing"],
    "pretrain_multipack_attn": sets("apart", truth),
    "train_on_inputs": when_on("data.loss", "all"),
    "val_set_size": held_out,
    "curriculum_sampling": sets("train.shuffle", lambda value: not truth(value)),
    "group_by_length": unsupported("order is random, or the order of the files"),
    "chat_template": named_template,
    "chat_template_jinja chat_template_kwargs eot_tokens default_system_message": template_setting,
    "dataset_exact_deduplication dataset_shard_num dataset_shard_idx min_sample_len "
    "skip_prepare_dataset": unsupported(
        "rows are taken as the files have them", "change the files"),
})  # fmt: skip


def _each_epoch(fact: str) -> Rule:
    return sets(fact, lambda value: part_of_epoch(Fraction(1, positive(value))), off=(0,))


TRAINING = rules.table({
    **{key: rule for key, rule in TRAINER.items()
       if key not in ("optim", "push_to_hub", "num_train_epochs", "per_device_train_batch_size")},
    **{key: SCRIPT[key] for key in ("warmup_ratio", "evaluation_strategy")},
    "micro_batch_size": TRAINER["per_device_train_batch_size"],
    "torch_compile": _also(when_on("model.compile", {}), "auto"),
    "batch_size": unsupported(
        "is the product of others", "write micro_batch_size and gradient_accumulation_steps"),
    "auto_find_batch_size": unsupported("a recipe's batch is fixed"),
    "num_epochs": TRAINER["num_train_epochs"],
    "optimizer": optimizer_rule("optim", {**OPTIMIZERS, "ao_adamw_8bit": {"moments": "8bit"}}),
    "lr_scheduler": TRAINER["lr_scheduler_type"],
    "cosine_min_lr_ratio": sets("optimizer.final_lr_ratio", rules.number),
    "bf16 bfloat16": _also(when_on("precision.compute", "bf16"), "auto", "full"),
    "float16": TRAINER["fp16"], "float32": when_on("precision.compute", "fp32"),
    "tf32": TRAINER["tf32"], "fp8": when_on("model.fp8", {}),
    "fp8_config": {"recipe": sets("model.fp8.recipe")},
    "fp8_enable_fsdp_float8_all_gather": unsupported("parameters are sent as they are", FP8),
    "early_stopping_patience": sets("train.early_stopping.patience", positive),
    "loss_watchdog_threshold": unsupported(
        "a run ends at a loss that is not finite, or at a spike", "set train.anomalies"),
    "loss_watchdog_patience": passes("follows loss_watchdog_threshold"),
    "saves_per_epoch": _each_epoch("save_part"), "evals_per_epoch": _each_epoch("eval_part"),
    "hub_model_id": TRAINER["push_to_hub"],
    "fsdp_version": FSDP_PREFIXED["version"],
    "fsdp_config": {
        **FSDP_PREFIXED,
        "cpu_offload_pin_memory": sets("fsdp.pin_memory", truth),
        "final_state_dict_type": passes(),
    },
    "context_parallel_size sequence_parallel_degree": sets("axolotl.context", positive, off=(0,)),
    "tensor_parallel_size": sets("axolotl.tensor", positive, off=(0,)),
    "dp_shard_size": sets("parallel.shard", positive),
    "dp_replicate_size": sets("parallel.replicate", positive),
})  # fmt: skip
TRACKING: Table = {
    **{f"use_{name}": when_on(f"{name}.use", True)
       for name in ("wandb", "tensorboard", "mlflow", "trackio")},
    **WANDB_PREFIXED,
    **MLFLOW,
    "trackio_project_name": text("trackio.project"), "trackio_run_name": text("trackio.name"),
}  # fmt: skip
SWITCHES = {
    "wandb_project": "wandb.use", "mlflow_experiment_name": "mlflow.use",
    "trackio_project_name": "trackio.use",
}  # fmt: skip
"""Keys that switch their tracker on."""
TABLE: Table = {**METHODS, **HARMLESS, **TRAINING, **TRACKING, **DATA, **ADAPTER, **MODEL}
