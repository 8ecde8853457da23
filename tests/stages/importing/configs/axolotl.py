"""Settings of recipes that axolotl 0.19 ships in `examples/` (Apache-2.0), by file name there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PROJECTIONS = ["gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"]
_NO_TRACKER = dict.fromkeys(
    ("wandb_project", "wandb_entity", "wandb_watch", "wandb_name", "wandb_log_model")
)

LORA: Mapping[str, Any] = {
    "base_model": "NousResearch/Llama-3.2-1B",
    "datasets": [{"path": "teknium/GPT4-LLM-Cleaned", "type": "alpaca"}],
    "val_set_size": 0.1,
    "output_dir": "./outputs/lora-out",
    "adapter": "lora",
    "lora_model_dir": None,
    "sequence_len": 2048,
    "sample_packing": True,
    "eval_sample_packing": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target_modules": _PROJECTIONS,
    **_NO_TRACKER,
    "gradient_accumulation_steps": 2,
    "micro_batch_size": 2,
    "num_epochs": 1,
    "optimizer": "adamw_8bit",
    "lr_scheduler": "cosine",
    "learning_rate": 0.0002,
    "bf16": "auto",
    "tf32": False,
    "gradient_checkpointing": True,
    "resume_from_checkpoint": None,
    "logging_steps": 1,
    "attn_implementation": "flash_attention_2",
    "loss_watchdog_threshold": 5.0,
    "loss_watchdog_patience": 3,
    "warmup_ratio": 0.1,
    "evals_per_epoch": 4,
    "saves_per_epoch": 1,
    "weight_decay": 0.0,
    "special_tokens": {"pad_token": "<|end_of_text|>"},
}
"""`llama-3/lora-1b.yml`."""

QLORA: Mapping[str, Any] = {
    **LORA,
    "load_in_8bit": False,
    "load_in_4bit": True,
    "dataset_prepared_path": "last_run_prepared",
    "output_dir": "./outputs/qlora-out",
    "adapter": "qlora",
    "lora_r": 32,
    "lora_alpha": 16,
    "gradient_accumulation_steps": 4,
    "optimizer": "adamw_bnb_8bit",
}
"""`llama-3/qlora-1b.yml`."""

FULL: Mapping[str, Any] = {
    "base_model": "NousResearch/Meta-Llama-3.1-8B",
    "plugins": ["axolotl.integrations.liger.LigerPlugin"],
    "liger_rope": True,
    "liger_rms_norm": True,
    "liger_glu_activation": True,
    "liger_fused_linear_cross_entropy": True,
    "chat_template": "llama3",
    "datasets": [
        {
            "path": "mlabonne/FineTome-100k",
            "type": "chat_template",
            "split": "train[:20%]",
            "field_messages": "conversations",
            "message_property_mappings": {"role": "from", "content": "value"},
        }
    ],
    "dataset_prepared_path": "last_run_prepared",
    "val_set_size": 0.02,
    "output_dir": "./outputs/out",
    "sequence_len": 4096,
    "sample_packing": True,
    **_NO_TRACKER,
    "gradient_accumulation_steps": 4,
    "micro_batch_size": 2,
    "num_epochs": 1,
    "optimizer": "adamw_torch_fused",
    "lr_scheduler": "cosine",
    "learning_rate": 2e-5,
    "bf16": "auto",
    "tf32": False,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "resume_from_checkpoint": None,
    "logging_steps": 1,
    "attn_implementation": "flash_attention_2",
    "warmup_ratio": 0.1,
    "evals_per_epoch": 2,
    "saves_per_epoch": 1,
    "weight_decay": 0.0,
    "fsdp": ["full_shard", "auto_wrap"],
    "fsdp_config": {
        "fsdp_limit_all_gathers": True,
        "fsdp_sync_module_states": True,
        "fsdp_offload_params": True,
        "fsdp_use_orig_params": False,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
    },
    "special_tokens": {"pad_token": "<|finetune_right_pad_id|>", "eos_token": "<|eot_id|>"},
}
"""`llama-3/fft-8b-liger-fsdp.yaml`."""
