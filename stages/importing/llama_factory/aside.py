"""Keys of LLaMA-Factory that give no fact: other methods, other commands, trackers."""

from __future__ import annotations

from typing import Any

from stages.importing import rules
from stages.importing.common import SWANLAB
from stages.importing.engines import CHOOSE, FOREIGN
from stages.importing.rules import RuleResult, Table, each_way, unsupported

_preferences = rules.passes("is read only by the preference and reward stages")
_reference = unsupported(
    "training on preferences or rewards is not supported by recipes", blocks=True
)
_other = unsupported("no recipe trains like this", blocks=True)
_loss = unsupported("the loss is the mean cross-entropy of the target tokens", blocks=True)


def _optimizer(value: Any) -> RuleResult:
    result = unsupported("no recipe has this optimizer", CHOOSE)(value)
    if result.outcome == "refused":
        result.fact, result.content = FOREIGN, "another optimizer"
    return result


_speed = rules.passes("changes speed or memory, no number")
_command = rules.passes("is read by another command than train")
_images = rules.passes("is about images, videos and sound")


def _owned(switch: str, keys: str) -> Table:
    """Return rules for the settings of something that `switch` turns on."""
    return each_way(keys, rules.follows(switch))


OPTIMIZERS: Table = {
    **each_way("use_galore use_apollo use_badam use_adam_mini use_muon", _optimizer),
    **_owned("use_galore", "galore_target galore_rank galore_update_interval galore_scale "
             "galore_proj_type galore_layerwise"),
    **_owned("use_apollo", "apollo_target apollo_rank apollo_update_interval apollo_scale "
             "apollo_proj apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front"),
    **_owned("use_badam", "badam_mode badam_start_block badam_switch_mode badam_switch_interval "
             "badam_update_ratio badam_mask_mode badam_verbose"),
}  # fmt: skip

METHODS: Table = {
    **each_way("pref_beta pref_ftx pref_bco_weight pref_loss dpo_label_smoothing ld_alpha "
               "kto_chosen_weight kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs "
               "ppo_score_norm ppo_target ppo_whiten_rewards reward_model_type "
               "ref_model_quantization_bit reward_model_quantization_bit "
               "ref_model_adapters reward_model_adapters", _preferences),
    **each_way("ref_model reward_model", _reference),
    **each_way("use_llama_pro mixture_of_depths shift_attn pissa_init use_mca use_kt "
               "use_hyper_parallel", _other),
    **_owned("pissa_init", "pissa_iter pissa_convert"),
    **_owned("use_hyper_parallel", "hyper_parallel_args"),
    **_owned("use_kt", "kt_weight_path kt_expert_checkpoint_path kt_use_lora_experts "
             "kt_lora_expert_num kt_lora_expert_intermediate_size"),
    **_owned("finetuning_type", "freeze_trainable_layers freeze_trainable_modules "
             "freeze_extra_modules module_dropout oft_rank oft_block_size oft_target"),
    **each_way("use_dft_loss use_asft_loss use_eaft_loss", _loss),
    **_owned("use_asft_loss", "asft_alpha"),
    **_owned("use_eaft_loss", "eaft_alpha"),
    "freeze_language_model": _other,
    **OPTIMIZERS,
}  # fmt: skip

HARMLESS: Table = {
    **each_way("use_unsloth use_reentrant_gc use_v1_kernels use_kv_cache offload_folder "
               "print_param_status tokenized_path data_shared_file_system "
               "plot_loss include_effective_tokens_per_second media_dir adapter_folder", _speed),
    **each_way("freeze_vision_tower freeze_multi_modal_projector image_max_pixels "
               "image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels "
               "video_min_pixels video_fps video_maxlen use_audio_in_video audio_sampling_rate",
               _images),
    **each_way("infer_backend infer_dtype export_dir export_size export_device "
               "export_quantization_bit export_quantization_dataset export_quantization_nsamples "
               "export_quantization_maxlen export_legacy_format export_hub_model_id vllm_maxlen "
               "vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen "
               "sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend "
               "generation_max_length generation_num_beams do_sample temperature top_p top_k "
               "num_beams max_new_tokens repetition_penalty length_penalty skip_special_tokens",
               _command),
}  # fmt: skip

ASIDE: Table = {**METHODS, **HARMLESS, **SWANLAB}
