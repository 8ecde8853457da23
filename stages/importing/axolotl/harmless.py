"""Keys of axolotl that change nothing that is trained, and those of other trackers."""

from __future__ import annotations

from stages.importing import rules
from stages.importing.axolotl.methods import METHODS
from stages.importing.common import SWANLAB
from stages.importing.rules import Table, each_way
from stages.importing.trackers import other_tracker

_place = rules.passes("the launcher places processes")
_speed = rules.passes("changes speed or memory, no number")
_resume = rules.passes("`pipe resume` continues a run")

HARMLESS: Table = {
    **each_way(
        "strict dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory "
        "num_dataset_shards_to_save hf_use_auth_token is_preprocess preprocess_iterable "
        "total_num_tokens total_supervised_tokens axolotl_config_path is_falcon_derived_model "
        "is_llama_derived_model is_mistral_derived_model is_qwen_derived_model "
        "tokenizer_use_fast tokenizer_type tokenizer_legacy tokenizer_save_jinja_files "
        "shuffle_merged_datasets shuffle_before_merging_datasets merge_lora merge_method "
        "include_tkps include_tokens_per_second mean_resizing_embeddings profiler_steps_start "
        "generate_samples num_generation_samples torchdistx_path gradio_title gradio_share "
        "gradio_server_name gradio_server_port gradio_max_new_tokens gradio_temperature",
        rules.passes(),
    ),
    **each_way("ddp device device_map world_size max_memory gpu_memory_limit", _place),
    **each_way(
        "sample_packing_group_size sample_packing_bin_size sample_packing_sequentially "
        "sample_packing_mp_start_method sample_packing_eff_est multipack_real_batches "
        "pad_to_multiple_of batch_flattening streaming streaming_multipack_buffer_size "
        "pretrain_multipack_buffer_size pretraining_sample_concatenation flash_attn_cross_entropy "
        "flash_attn_fuse_mlp flash_attn_rms_norm flash_optimum flex_attn_compile_kwargs "
        "fused_attn_kernel sdpa_varlen lora_mlp_kernel lora_qkv_kernel lora_o_kernel "
        "lora_embedding_kernel lora_on_cpu qlora_sharded_model_loading embeddings_skip_upcast "
        "chunked_cross_entropy chunked_cross_entropy_num_chunks liger_fused_linear_cross_entropy "
        "liger_cross_entropy liger_rms_norm_gated cut_cross_entropy use_scattermoe use_sonicmoe "
        "tiled_mlp tiled_mlp_num_shards "
        "tiled_mlp_use_original_mlp heads_k_stride ring_attn_func use_kernels "
        "experts_implementation experimental_skip_move_to_device deepcompile gc_steps "
        "gc_collect_steps torch_empty_cache_steps layer_offloading fsdp_final_state_dict_type "
        "torch_compile_options",
        _speed,
    ),
    "auto_resume_from_checkpoints": _resume,
}

TRACKERS: Table = {
    **SWANLAB,
    **each_way(
        "use_comet comet_workspace comet_project_name comet_experiment_key comet_mode comet_online "
        "comet_experiment_config use_otel_metrics otel_metrics_host otel_metrics_port",
        other_tracker,
    ),
}

ASIDE: Table = {**METHODS, **HARMLESS, **TRACKERS}
"""All keys that give no fact."""
