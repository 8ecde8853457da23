"""Settings of recipes that LLaMA-Factory has in `examples/` (Apache-2.0), and entries of its
`data/dataset_info.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LORA: Mapping[str, Any] = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct",
    "trust_remote_code": True,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "dataset": "identity,alpaca_en_demo",
    "template": "llama3",
    "cutoff_len": 2048,
    "max_samples": 1000,
    "overwrite_cache": True,
    "preprocessing_num_workers": 16,
    "output_dir": "saves/llama3-8b/lora/sft",
    "logging_steps": 10,
    "save_steps": 500,
    "plot_loss": True,
    "overwrite_output_dir": True,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1.0e-4,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "ddp_timeout": 180000000,
}
"""`train_lora/llama3_lora_sft.yaml`."""


def _without(settings: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}


FULL: Mapping[str, Any] = {
    **_without(LORA, "lora_rank", "lora_target"),
    "finetuning_type": "full",
    "deepspeed": "examples/deepspeed/ds_z3_config.json",
    "output_dir": "saves/llama3-8b/full/sft",
    "gradient_accumulation_steps": 2,
    "learning_rate": 1.0e-5,
}
"""`train_full/llama3_full_sft.yaml`."""
QLORA: Mapping[str, Any] = {
    **_without(LORA, "lora_rank", "trust_remote_code", "bf16"),
    "quantization_bit": 4,
    "lora_target": "q_proj,v_proj",
    "cutoff_len": 1024,
    "fp16": True,
    "val_size": 0.1,
    "per_device_eval_batch_size": 1,
    "eval_strategy": "steps",
    "eval_steps": 500,
}
"""`extras/fsdp_qlora/llama3_lora_sft.yaml`, which is started with FSDP."""
FSDP: Mapping[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "FSDP",
    "downcast_bf16": "no",
    "fsdp_config": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_forward_prefetch": False,
        "fsdp_offload_params": True,
        "fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_sync_module_states": True,
        "fsdp_use_orig_params": False,
    },
    "machine_rank": 0,
    "mixed_precision": "fp16",
    "num_machines": 1,
    "num_processes": 2,
}
"""`accelerate/fsdp_config.yaml`."""
PRETRAIN: Mapping[str, Any] = {
    **_without(LORA, "template"),
    "stage": "pt",
    "dataset": "c4_demo",
    "output_dir": "saves/llama3-8b/lora/pretrain",
}
"""`train_lora/llama3_lora_pretrain.yaml`."""
DPO: Mapping[str, Any] = {
    **LORA,
    "stage": "dpo",
    "pref_beta": 0.1,
    "pref_loss": "sigmoid",
    "dataset": "dpo_en_demo",
    "output_dir": "saves/llama3-8b/lora/dpo",
    "learning_rate": 5.0e-6,
}
"""`train_lora/llama3_lora_dpo.yaml`."""

_OPENAI_TAGS = {
    "role_tag": "role", "content_tag": "content", "user_tag": "user",
    "assistant_tag": "assistant", "system_tag": "system",
}  # fmt: skip
INFO: Mapping[str, Any] = {
    "identity": {"file_name": "identity.json"},
    "alpaca_en_demo": {"file_name": "alpaca_en_demo.json"},
    "c4_demo": {"file_name": "c4_demo.jsonl", "columns": {"prompt": "text"}},
    "glaive_toolcall_en": {
        "hf_hub_url": "llamafactory/glaive_toolcall_en",
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "tools": "tools"},
    },
    "open_thoughts": {
        "hf_hub_url": "llamafactory/OpenThoughts-114k",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": _OPENAI_TAGS,
    },
    "ultrachat_200k": {
        "hf_hub_url": "HuggingFaceH4/ultrachat_200k",
        "ms_hub_url": "AI-ModelScope/ultrachat_200k",
        "split": "train_sft",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": _OPENAI_TAGS,
    },
    "openorca": {
        "hf_hub_url": "Open-Orca/OpenOrca",
        "columns": {"prompt": "question", "response": "response", "system": "system_prompt"},
    },
    "deepctrl": {"ms_hub_url": "deepctrl/deepctrl-sft-data"},
    "dpo_en_demo": {
        "file_name": "dpo_en_demo.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
}
