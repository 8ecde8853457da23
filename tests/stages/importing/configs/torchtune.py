"""Settings of recipes that torchtune 0.6.1 ships in `recipes/configs/` (BSD 3-clause)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PROFILER = {
    "_component_": "torchtune.training.setup_torch_profiler", "enabled": False,
    "output_dir": "${output_dir}/profiling_outputs", "cpu": True, "cuda": True,
    "wait_steps": 5, "warmup_steps": 3, "active_steps": 2, "num_cycles": 1,
}  # fmt: skip
_LOGGING = {
    "metric_logger": {
        "_component_": "torchtune.training.metric_logging.DiskLogger",
        "log_dir": "${output_dir}/logs",
    },
    "log_every_n_steps": 1,
    "log_peak_memory_stats": True,
    "device": "cuda",
    "dtype": "bf16",
    "profiler": _PROFILER,
}
_SCHEDULE = {
    "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "num_warmup_steps": 100,
}
_LOSS = {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}

LORA: Mapping[str, Any] = {
    "output_dir": "/tmp/torchtune/llama3_1_8B/lora",
    "tokenizer": {
        "_component_": "torchtune.models.llama3.llama3_tokenizer",
        "path": "/tmp/Meta-Llama-3.1-8B-Instruct/original/tokenizer.model",
        "max_seq_len": None,
    },
    "model": {
        "_component_": "torchtune.models.llama3_1.lora_llama3_1_8b",
        "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
        "apply_lora_to_mlp": True,
        "apply_lora_to_output": False,
        "lora_rank": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
    },
    "checkpointer": {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": "/tmp/Meta-Llama-3.1-8B-Instruct/",
        "checkpoint_files": ["model-00001-of-00004.safetensors"],
        "recipe_checkpoint": None,
        "output_dir": "${output_dir}",
        "model_type": "LLAMA3",
    },
    "resume_from_checkpoint": False,
    "save_adapter_weights_only": False,
    "dataset": {"_component_": "torchtune.datasets.alpaca_cleaned_dataset", "packed": False},
    "seed": None,
    "shuffle": True,
    "batch_size": 2,
    "optimizer": {
        "_component_": "torch.optim.AdamW", "fused": True, "weight_decay": 0.01, "lr": "3e-4",
    },
    "lr_scheduler": _SCHEDULE,
    "loss": _LOSS,
    "epochs": 1,
    "max_steps_per_epoch": None,
    "gradient_accumulation_steps": 8,
    "clip_grad_norm": None,
    "compile": False,
    **_LOGGING,
    "enable_activation_checkpointing": False,
    "enable_activation_offloading": False,
}  # fmt: skip
"""`llama3_1/8B_lora.yaml`."""

FULL: Mapping[str, Any] = {
    "output_dir": "/tmp/torchtune/llama2_7B/full_low_memory",
    "tokenizer": {
        "_component_": "torchtune.models.llama2.llama2_tokenizer",
        "path": "/tmp/Llama-2-7b-hf/tokenizer.model",
        "max_seq_len": None,
    },
    "dataset": {"_component_": "torchtune.datasets.alpaca_dataset", "packed": False},
    "seed": None,
    "shuffle": True,
    "model": {"_component_": "torchtune.models.llama2.llama2_7b"},
    "checkpointer": {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": "/tmp/Llama-2-7b-hf",
        "checkpoint_files": ["pytorch_model-00001-of-00002.bin"],
        "recipe_checkpoint": None,
        "output_dir": "${output_dir}",
        "model_type": "LLAMA2",
    },
    "resume_from_checkpoint": False,
    "batch_size": 2,
    "epochs": 1,
    "optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW", "lr": "1e-5"},
    "lr_scheduler": _SCHEDULE,
    "optimizer_in_bwd": True,
    "loss": _LOSS,
    "max_steps_per_epoch": None,
    "gradient_accumulation_steps": 1,
    "clip_grad_norm": None,
    "compile": False,
    "enable_activation_checkpointing": True,
    "enable_activation_offloading": True,
    **_LOGGING,
}
"""`llama2/7B_full_low_memory.yaml`."""
