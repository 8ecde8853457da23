"""The keys of an axolotl recipe."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from stages.importing import rules
from stages.importing.engines import FSDP_PREFIXED
from stages.importing.recipe import part_of_epoch
from stages.importing.rules import RuleResult, Table, outcome, rule, table
from stages.importing.trackers import MLFLOW, SWANLAB, WANDB_PREFIXED, other_tracker
from stages.importing.trainer import EIGHT_BITS, LORA, OPTIMIZERS, SHARED, TRAINER

PLUGINS = tuple(f"axolotl.integrations.{name}" for name in (
    "liger.LigerPlugin", "cut_cross_entropy.CutCrossEntropyPlugin", "kernels.KernelsPlugin",
    "swanlab.SwanLabPlugin"))  # fmt: skip
"""Plugins that change nothing that is trained: kernels, which have keys of their own, and
trackers."""


def _plugins(value: object) -> RuleResult:
    if unknown := [name for name in rules.names(value) if name not in PLUGINS]:
        why = f"refused {', '.join(unknown)} may change the training"
        return outcome(f"{why} !! leave it out, if it does not")
    return outcome("ignored these plugins change nothing that is trained")


def _selective(value: Any) -> RuleResult:
    if value in (True, {"save": ["attention"]}):
        return rules.translated("model.activation_checkpointing.keep", "attention")
    return rule("untranslated model.activation_checkpointing has other choices")(value)


TABLE: Table = {
    **SWANLAB, **WANDB_PREFIXED, **MLFLOW,
    **{key: rule for key, rule in LORA.items() if key.startswith(("lora_", "load_"))},
    **{key: rule for key, rule in TRAINER.items()
       if key not in ("optim", "push_to_hub", "num_train_epochs", "per_device_train_batch_size")},
    **table("""
    rl reward_model process_reward_model center_rewards_coefficient num_labels trl ebft vllm
    dpo_beta dpo_label_smoothing dpo_loss_type dpo_loss_weights dpo_use_weighting
    precompute_ref_log_probs rl_beta rpo_alpha orpo_alpha simpo_gamma cpo_alpha kto_desirable_weight
    kto_undesirable_weight max_prompt_len: refused training on preferences or rewards is not \
        supported by recipes !! train with TRL
    gptq jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps lisa_n_layers
    lisa_step_interval qat relora trainer_cls unfrozen_parameters use_pose use_onebitllms
    noisy_embedding_alpha scaling_softmax llama4_linearized_experts: refused no recipe trains like \
        this !!
    relora_prune_method: ignored follows relora
    lisa_layers_attribute: ignored follows lisa_n_layers
    pose_split_on_token_ids pose_max_context_len pose_num_chunks: ignored follows use_pose
    use_eaft: refused the loss is the mean cross-entropy of the target tokens !!
    eaft_alpha eaft_k: ignored follows use_eaft
    processor_type image_size is_multimodal freeze_mm_modules: refused recipes train on text only !!
    image_resize_algorithm processor_kwargs: ignored follows processor_type | plugins: @plugins
    quantization: untranslated `axolotl quantize` reads it, training does not
    embedding_lr embedding_lr_scale lr_groups adam_beta3 adam_epsilon2 cosine_constant_lr_ratio
    lr_quadratic_warmup lr_div_factor: refused no optimizer of a recipe has it -- leave it out, or \
        set optimizer.groups

    strict dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory
    num_dataset_shards_to_save hf_use_auth_token is_preprocess preprocess_iterable total_num_tokens
    total_supervised_tokens axolotl_config_path is_falcon_derived_model is_llama_derived_model
    is_mistral_derived_model is_qwen_derived_model tokenizer_use_fast tokenizer_type
    tokenizer_legacy tokenizer_save_jinja_files shuffle_merged_datasets
    shuffle_before_merging_datasets merge_lora merge_method include_tkps include_tokens_per_second
    mean_resizing_embeddings profiler_steps_start generate_samples num_generation_samples
    torchdistx_path gradio_title gradio_share gradio_server_name gradio_server_port
    gradio_max_new_tokens gradio_temperature special_tokens.pad_token: ignored changes nothing \
        that is trained
    ddp device device_map world_size max_memory gpu_memory_limit: ignored the launcher places \
        processes
    sample_packing_group_size sample_packing_bin_size sample_packing_sequentially
    sample_packing_mp_start_method sample_packing_eff_est multipack_real_batches pad_to_multiple_of
    batch_flattening streaming streaming_multipack_buffer_size pretrain_multipack_buffer_size
    pretraining_sample_concatenation flash_attn_cross_entropy flash_attn_fuse_mlp
    flash_attn_rms_norm flash_optimum flex_attn_compile_kwargs fused_attn_kernel sdpa_varlen
    lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel lora_on_cpu
    qlora_sharded_model_loading embeddings_skip_upcast chunked_cross_entropy
    chunked_cross_entropy_num_chunks liger_fused_linear_cross_entropy liger_cross_entropy
    liger_rms_norm_gated cut_cross_entropy use_scattermoe use_sonicmoe tiled_mlp
    tiled_mlp_num_shards tiled_mlp_use_original_mlp heads_k_stride ring_attn_func use_kernels
    experts_implementation experimental_skip_move_to_device deepcompile gc_steps gc_collect_steps
    torch_empty_cache_steps layer_offloading fsdp_final_state_dict_type torch_compile_options: \
        ignored changes speed or memory, no number
    auto_resume_from_checkpoints: ignored `pipe resume` continues a run
    use_comet comet_workspace comet_project_name comet_experiment_key comet_mode comet_online
    comet_experiment_config use_otel_metrics otel_metrics_host otel_metrics_port: @other_tracker
    use_wandb: wandb.use = true | use_tensorboard: tensorboard.use = true
    use_mlflow: mlflow.use = true | use_trackio: trackio.use = true
    trackio_project_name: trackio.project off= | trackio_run_name: trackio.name off=

    base_model base_model_config: @model_name_or_path | tokenizer_config: @tokenizer_name
    model_revision revision_of_model: @model_revision | trust_remote_code: @trust_remote_code
    model_type type_of_model: if .*ForCausalLM then ignored every model is a causal language model \
        else never recipes train causal language models !!
    reinit_weights: model.init = random
    model_config overrides_of_model_config model_kwargs overrides_of_model_kwargs rope_scaling
    model_quantization_config: refused the model is as its config says -- change the model's \
        config.json
    tokens added_tokens_overrides resize_token_embeddings_to_32x shrink_embeddings
    fix_untrained_tokens tokenizer_use_mistral_common special_tokens.bos_token
    special_tokens.eos_token special_tokens.unk_token special_tokens.additional_special_tokens: \
        @new_tokens
    attn_implementation: if .*/.* then model.attention else model.attention eager, sdpa, \
        flash_attention_2, flash_attention_3, flash_attention_4, flex_attention -- use \
        flash_attention_2 or sdpa
    flash_attention: model.attention = flash_attention_2 | sdp_attention: model.attention = sdpa
    flex_attention: model.attention = flex_attention | eager_attention: model.attention = eager
    xformers_attention sage_attention: refused recipes do not have this kernel -- set \
        attn_implementation
    gradient_checkpointing: if offload.* then model.activation_checkpointing.offload on else \
        model.activation_checkpointing = {}
    activation_offloading: model.activation_checkpointing.offload on off=false
    selective_checkpointing: @selective
    liger_rope liger_rms_norm liger_layer_norm liger_glu_activation: model.kernels = liger

    adapter: adapter lora=true, qlora=true off= !! use lora or qlora
    lora_target_linear: adapter.targets = all-linear | lora_fan_in_fan_out: always false
    lora_model_dir: adapter.start_from path off= | peft_use_rslora: @use_rslora
    peft_use_dora: @use_dora | peft_init_lora_weights peft_autocast_adapter_dtype: always true
    bnb_config_kwargs.bnb_4bit_quant_type: @bnb_4bit_quant_type
    bnb_config_kwargs.bnb_4bit_use_double_quant: @bnb_4bit_use_double_quant
    loraplus_lr_ratio: optimizer.groups lora_b
    loraplus_lr_embedding: ignored no embedding has an adapter

    sequence_len: @max_length | sample_packing: @packing | pretrain_multipack_attn: apart truth
    excess_length_strategy: data.too_long drop, truncate, raise=error
    train_on_inputs: data.loss = all | val_set_size: data.heldout_fraction fraction off=0,"0","0.0"
    curriculum_sampling: train.shuffle other
    group_by_length: refused order is random, or the order of the files
    chat_template: @named_template
    chat_template_jinja chat_template_kwargs eot_tokens default_system_message: @template_setting
    dataset_exact_deduplication dataset_shard_num dataset_shard_idx min_sample_len
    skip_prepare_dataset: refused rows are taken as the files have them -- change the files

    micro_batch_size: @per_device_train_batch_size | num_epochs: @num_train_epochs
    batch_size: refused is the product of others -- write micro_batch_size and \
        gradient_accumulation_steps
    auto_find_batch_size: refused a recipe's batch is fixed | evaluation_strategy: @eval_strategy
    optimizer: foreign optim optimizers | lr_scheduler: @lr_scheduler_type
    warmup_ratio: @warmup_ratio | cosine_min_lr_ratio: optimizer.final_lr_ratio number
    torch_compile: model.compile = {} on=auto | bf16 bfloat16: precision.compute = bf16 on=auto,full
    float16: precision.compute = fp16 | float32: precision.compute = fp32 | fp8: model.fp8 = {}
    fp8_config.recipe: model.fp8.recipe
    fp8_enable_fsdp_float8_all_gather: refused parameters are sent as they are -- set model.fp8 in \
        the recipe
    early_stopping_patience: train.early_stopping.patience positive
    loss_watchdog_threshold: refused a run ends at a loss that is not finite, or at a spike -- set \
        train.anomalies
    loss_watchdog_patience: ignored follows loss_watchdog_threshold
    saves_per_epoch: save_part each_epoch off=0 | evals_per_epoch: eval_part each_epoch off=0
    hub_model_id: @push_to_hub | fsdp_version: always 2, 1, "1", "2"
    context_parallel_size sequence_parallel_degree: axolotl.context positive off=0
    tensor_parallel_size: axolotl.tensor positive off=0 | dp_shard_size: parallel.shard positive
    dp_replicate_size: parallel.replicate positive
    """, **SHARED | {
        "plugins": _plugins, "other_tracker": other_tracker, "selective": _selective,
        "on": lambda _: True, "other": lambda value: not rules.truth(value),
        "each_epoch": lambda value: part_of_epoch(Fraction(1, rules.positive(value))),
        "optimizers": {**OPTIMIZERS, "ao_adamw_8bit": EIGHT_BITS},
    }),
    "fsdp_config": {**FSDP_PREFIXED, **table("""
        cpu_offload_pin_memory: fsdp.pin_memory truth
        final_state_dict_type: ignored changes nothing that is trained
    """)},
}  # fmt: skip
