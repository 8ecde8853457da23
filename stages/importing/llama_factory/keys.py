"""The keys of a LLaMA-Factory recipe."""

from __future__ import annotations

from typing import Any

from stages.importing import rules
from stages.importing.rules import Table, table
from stages.importing.trackers import SWANLAB
from stages.importing.trainer import SHARED, TRAINER


def _targets(value: Any) -> list[str] | str:
    found = rules.names(value)
    return "all-linear" if found == ["all"] else found


def _adapter_folder(value: Any) -> str:
    if len(rules.names(value)) != 1:
        raise rules.WrongValueError("merges several adapters !! merge them first")
    return rules.path(value)


TABLE: Table = {
    **SWANLAB, **TRAINER,
    **table("""
    pref_beta pref_ftx pref_bco_weight pref_loss dpo_label_smoothing ld_alpha kto_chosen_weight
    kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs ppo_score_norm ppo_target
    ppo_whiten_rewards reward_model_type ref_model_quantization_bit reward_model_quantization_bit
    ref_model_adapters reward_model_adapters: ignored is read only by the preference and reward \
        stages
    ref_model reward_model: refused training on preferences or rewards is not supported by recipes \
        !!
    use_llama_pro mixture_of_depths shift_attn pissa_init use_mca use_kt use_hyper_parallel
    freeze_language_model: refused no recipe trains like this !!
    pissa_iter pissa_convert: ignored follows pissa_init
    hyper_parallel_args: ignored follows use_hyper_parallel
    kt_weight_path kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num
    kt_lora_expert_intermediate_size: ignored follows use_kt
    freeze_trainable_layers freeze_trainable_modules freeze_extra_modules module_dropout oft_rank
    oft_block_size oft_target: ignored follows finetuning_type
    use_dft_loss use_asft_loss use_eaft_loss: refused the loss is the mean cross-entropy of the \
        target tokens !!
    asft_alpha: ignored follows use_asft_loss | eaft_alpha: ignored follows use_eaft_loss
    use_galore use_apollo use_badam use_adam_mini use_muon: foreign refused no recipe has this \
        optimizer
    galore_target galore_rank galore_update_interval galore_scale galore_proj_type \
        galore_layerwise: ignored follows use_galore
    apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type
    apollo_scale_type apollo_layerwise apollo_scale_front: ignored follows use_apollo
    badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio
    badam_mask_mode badam_verbose: ignored follows use_badam
    use_unsloth use_reentrant_gc use_v1_kernels use_kv_cache offload_folder print_param_status
    tokenized_path data_shared_file_system plot_loss include_effective_tokens_per_second media_dir
    adapter_folder: ignored changes speed or memory, no number
    freeze_vision_tower freeze_multi_modal_projector image_max_pixels image_min_pixels
    image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels video_fps video_maxlen
    use_audio_in_video audio_sampling_rate: ignored is about images, videos and sound
    infer_backend infer_dtype export_dir export_size export_device export_quantization_bit
    export_quantization_dataset export_quantization_nsamples export_quantization_maxlen
    export_legacy_format export_hub_model_id vllm_maxlen vllm_gpu_util vllm_enforce_eager
    vllm_max_lora_rank vllm_config sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config
    sglang_lora_backend generation_max_length generation_num_beams do_sample temperature top_p top_k
    num_beams max_new_tokens repetition_penalty length_penalty skip_special_tokens: ignored is \
        read by another command than train

    model_name_or_path: @model_name_or_path | model_revision: @model_revision
    trust_remote_code: @trust_remote_code
    adapter_name_or_path: adapter.start_from adapter_folder
    flash_attn: model.attention disabled=eager, sdpa, fa2=flash_attention_2, fa3=flash_attention_3 \
        off=auto
    enable_liger_kernel: @use_liger_kernel
    disable_gradient_checkpointing: ignored model.activation_checkpointing says it
    create_new_adapter: refused merges the adapter that it is given !! merge it first
    use_unsloth_gc: model.activation_checkpointing.offload = true
    train_from_scratch: model.init = random | moe_aux_loss_coef: train.router_loss number
    upcast_layernorm upcast_lmhead_output: refused one dtype computes the whole model -- set \
        precision.compute
    rope_scaling: refused the model is as its config says -- change the model's config.json
    resize_vocab add_tokens add_special_tokens new_special_tokens_config split_special_tokens: \
        @new_tokens
    init_special_tokens: ignored follows add_special_tokens
    quantization_bit: if 4 then quantize 4=true else never weights are held whole or in 4 bits -- \
        set quantization_bit: 4

    quantization_type: @bnb_4bit_quant_type | quantization_method: always bnb, bitsandbytes !!
    double_quantization: @bnb_4bit_use_double_quant
    quantization_device_map: ignored follows quantization_bit

    stage: if pt|sft then ignored data.chat or data.text trains so else never {0!r} trains on \
        preferences or rewards, which is not supported by recipes !! use stage: sft or pt, or \
        train with TRL
    finetuning_type: if lora|full then adapter lora=true, full=false else never no recipe trains \
        by {0!r} !! use lora or full
    pure_bf16: precision.master = bf16 | lora_rank: @lora_r | lora_alpha: @lora_alpha
    lora_dropout: @lora_dropout | use_rslora: @use_rslora | use_dora: @use_dora
    lora_target: adapter.targets targets | additional_target: @lora_modules_to_save
    warmup_ratio: @warmup_ratio | loraplus_lr_ratio: optimizer.groups lora_b
    loraplus_lr_embedding: ignored no embedding has an adapter
    early_stopping_steps: train.early_stopping.patience positive
    evaluation_strategy: @eval_strategy | disable_shuffling: train.shuffle = false
    fp8: model.fp8 = {} | fp8_backend: always torchao, auto
    fp8_enable_fsdp_float8_all_gather: refused parameters are sent as they are

    template: @named_template | tool_format default_system: @template_setting
    enable_thinking: always true -- set it in the rows' chat_template_kwargs
    preserve_thinking: always false -- set it in the rows' chat_template_kwargs
    cutoff_len: cutoff positive | packing: packing truth | neat_packing: neat truth
    train_on_prompt: data.loss = all | mask_history: data.loss = last
    val_size: data.heldout_fraction fraction off=0,"0","0.0"
    max_samples: refused rows are taken as the files have them -- change the files
    mix_strategy: always concat, interleave_over -- use interleave_over, with weights
    streaming: ignored rows come in the order of every run | buffer_size: ignored follows streaming
    dataset_dir: ignored is where the files of the data sets are
    ignore_pad_token_for_loss: always true
    """, **SHARED | {
        "targets": _targets, "adapter_folder": _adapter_folder,
    }),
}  # fmt: skip
