"""The keys of a LLaMA-Factory recipe."""

from __future__ import annotations

from typing import Any

from stages.importing import rules
from stages.importing.engines import CHOOSE, foreign
from stages.importing.rules import (
    RuleResult,
    Table,
    allowed,
    passes,
    refused,
    sets,
    unsupported,
    when_on,
)
from stages.importing.trackers import SWANLAB
from stages.importing.trainer import (
    LORA_PLUS,
    SCRIPT,
    TRAINER,
    also,
    held_out,
    named_template,
    new_tokens,
    template_setting,
)

_other = unsupported("no recipe trains like this", blocks=True)
METHODS = rules.table({
    "pref_beta pref_ftx pref_bco_weight pref_loss dpo_label_smoothing ld_alpha kto_chosen_weight "
    "kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs ppo_score_norm ppo_target "
    "ppo_whiten_rewards reward_model_type ref_model_quantization_bit "
    "reward_model_quantization_bit ref_model_adapters reward_model_adapters":
        passes("is read only by the preference and reward stages"),
    "ref_model reward_model": unsupported(
        "training on preferences or rewards is not supported by recipes", blocks=True),
    "use_llama_pro mixture_of_depths shift_attn pissa_init use_mca use_kt use_hyper_parallel "
    "freeze_language_model": _other,
    "pissa_iter pissa_convert": passes("follows pissa_init"),
    "hyper_parallel_args": passes("follows use_hyper_parallel"),
    "kt_weight_path kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num "
    "kt_lora_expert_intermediate_size": passes("follows use_kt"),
    "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules module_dropout "
    "oft_rank oft_block_size oft_target": passes("follows finetuning_type"),
    "use_dft_loss use_asft_loss use_eaft_loss": unsupported(
        "the loss is the mean cross-entropy of the target tokens", blocks=True),
    "asft_alpha": passes("follows use_asft_loss"),
    "eaft_alpha": passes("follows use_eaft_loss"),
    "use_galore use_apollo use_badam use_adam_mini use_muon": foreign(
        unsupported("no recipe has this optimizer", CHOOSE), lambda _: "another optimizer"),
    "galore_target galore_rank galore_update_interval galore_scale galore_proj_type "
    "galore_layerwise": passes("follows use_galore"),
    "apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type "
    "apollo_scale_type apollo_layerwise apollo_scale_front": passes("follows use_apollo"),
    "badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio "
    "badam_mask_mode badam_verbose": passes("follows use_badam"),
})  # fmt: skip
"""Keys that train something else than a language model on its text, or otherwise."""
HARMLESS = rules.table({
    "use_unsloth use_reentrant_gc use_v1_kernels use_kv_cache offload_folder print_param_status "
    "tokenized_path data_shared_file_system plot_loss include_effective_tokens_per_second "
    "media_dir adapter_folder": passes("changes speed or memory, no number"),
    "freeze_vision_tower freeze_multi_modal_projector image_max_pixels image_min_pixels "
    "image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels video_fps "
    "video_maxlen use_audio_in_video audio_sampling_rate":
        passes("is about images, videos and sound"),
    "infer_backend infer_dtype export_dir export_size export_device export_quantization_bit "
    "export_quantization_dataset export_quantization_nsamples export_quantization_maxlen "
    "export_legacy_format export_hub_model_id vllm_maxlen vllm_gpu_util vllm_enforce_eager "
    "vllm_max_lora_rank vllm_config sglang_maxlen sglang_mem_fraction sglang_tp_size "
    "sglang_config sglang_lora_backend generation_max_length generation_num_beams do_sample "
    "temperature top_p top_k num_beams max_new_tokens repetition_penalty length_penalty "
    "skip_special_tokens": passes("is read by another command than train"),
    **SWANLAB,
})  # fmt: skip
"""Keys that change nothing that is trained, keys of other commands, and of other trackers."""

ATTENTION = {"disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2",
             "fa3": "flash_attention_3"}  # fmt: skip


def _method(value: Any) -> RuleResult:
    if value in ("lora", "full"):
        return rules.translated("adapter", value == "lora")
    return refused(f"no recipe trains by {value!r}", "use lora or full", blocks=True)


def _bits(value: Any) -> RuleResult:
    if str(value) == "4":
        return rules.translated("quantize", True)
    why = "weights are held whole or in 4 bits"
    return rules.unset() if value is None else refused(why, "set quantization_bit: 4")


def _targets(value: Any) -> list[str] | str:
    found = rules.names(value)
    return "all-linear" if found == ["all"] else found


def _adapter_folder(value: Any) -> str:
    if len(rules.names(value)) != 1:
        raise rules.WrongValueError("merges several adapters", "merge them first", blocks=True)
    return rules.path(value)


MODEL = rules.table({
    "adapter_name_or_path": sets("adapter.start_from", _adapter_folder),
    "flash_attn": sets("model.attention", rules.choice(ATTENTION), off=("auto",)),
    "enable_liger_kernel": TRAINER["use_liger_kernel"],
    "disable_gradient_checkpointing": passes("model.activation_checkpointing says it"),
    "create_new_adapter": unsupported(
        "merges the adapter that it is given", "merge it first", blocks=True),
    "use_unsloth_gc": when_on("model.activation_checkpointing.offload", True),
    "train_from_scratch": when_on("model.init", "random"),
    "moe_aux_loss_coef": sets("train.router_loss", rules.number),
    "upcast_layernorm upcast_lmhead_output": unsupported(
        "one dtype computes the whole model", "set precision.compute"),
    "rope_scaling": unsupported(
        "the model is as its config says", "change the model's config.json"),
    "resize_vocab add_tokens add_special_tokens new_special_tokens_config split_special_tokens":
        new_tokens,
    "init_special_tokens": passes("follows add_special_tokens"), "quantization_bit": _bits,
    "quantization_type": SCRIPT["bnb_4bit_quant_type"],
    "quantization_method": allowed("bnb", "bitsandbytes", blocks=True),
    "double_quantization": SCRIPT["bnb_4bit_use_double_quant"],
    "quantization_device_map": passes("follows quantization_bit"),
})  # fmt: skip
METHOD: Table = {
    "stage": rules.only(
        ("pt", "sft").__contains__, "data.chat or data.text trains so",
        "{0!r} trains on preferences or rewards, which is not supported by recipes",
        "use stage: sft or pt, or train with TRL", blocks=True),
    "finetuning_type": _method,
    "pure_bf16": when_on("precision.master", "bf16"),
    "lora_rank": SCRIPT["lora_r"],
    **{key: SCRIPT[key] for key in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")},
    "lora_target": sets("adapter.targets", _targets),
    "additional_target": sets("adapter.train_also", also),
    "early_stopping_steps": sets("train.early_stopping.patience", rules.positive),
    "disable_shuffling": when_on("train.shuffle", False),
    "fp8": when_on("model.fp8", {}), "fp8_backend": allowed("torchao", "auto"),
    "fp8_enable_fsdp_float8_all_gather": unsupported("parameters are sent as they are"),
    **LORA_PLUS,
}  # fmt: skip
DATA = rules.table({
    "template": named_template,
    "tool_format default_system": template_setting,
    "enable_thinking": allowed(True, hint="set it in the rows' chat_template_kwargs"),
    "preserve_thinking": allowed(False, hint="set it in the rows' chat_template_kwargs"),
    "cutoff_len": sets("cutoff", rules.positive),
    "train_on_prompt": when_on("data.loss", "all"), "mask_history": when_on("data.loss", "last"),
    "packing": sets("packing", rules.truth), "neat_packing": sets("neat", rules.truth),
    "val_size": held_out,
    "max_samples": unsupported("rows are taken as the files have them", "change the files"),
    "mix_strategy": allowed("concat", "interleave_over", hint="use interleave_over, with weights"),
    "streaming": passes("rows come in the order of every run"),
    "buffer_size": passes("follows streaming"),
    "dataset_dir": passes("is where the files of the data sets are"),
    "ignore_pad_token_for_loss": allowed(True),
})  # fmt: skip
_SHARED = ("model_name_or_path", "model_revision", "trust_remote_code", "warmup_ratio",
           "evaluation_strategy")  # fmt: skip
TABLE: Table = {
    **METHODS, **HARMLESS, **TRAINER, **{key: SCRIPT[key] for key in _SHARED}, **DATA, **METHOD,
    **MODEL,
}  # fmt: skip
