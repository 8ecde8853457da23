"""Files of TrainingArguments by name, with the keys that example scripts keep there too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRAINER: Mapping[str, Mapping[str, Any]] = {
    "trainer/chat.yaml": {
        "run_name": "support desk",
        "output_dir": "results/support-desk",
        "overwrite_output_dir": True,
        "model_name_or_path": "allenai/OLMo-2-0425-1B",
        "model_revision": "main",
        "attn_implementation": "flash_attention_2",
        "torch_dtype": "float16",
        "chat_template": "{% for m in messages %}\n[{{ m.role }}] {{ m.content }}\n{% endfor %}",
        "dataset_mixture": {
            "seed": 8,
            "test_split_size": 50,
            "datasets": [
                {"id": "our/tickets", "split": "answered", "columns": ["turns"], "weight": 0.7},
                {"id": "our/manuals", "split": "all", "config": "v3", "weight": 0.3},
            ],
        },
        "dataset_num_proc": 3,
        "max_seq_length": 512,
        "num_train_epochs": 2,
        "max_steps": -1,
        "per_device_train_batch_size": 5,
        "per_device_eval_batch_size": 10,
        "gradient_accumulation_steps": 3,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "learning_rate": 4.5e-6,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.04,
        "bf16": True,
        "do_eval": True,
        "eval_strategy": "epoch",
        "logging_strategy": "steps",
        "logging_steps": 20,
        "log_level": "warning",
        "report_to": ["tensorboard", "mlflow"],
        "save_strategy": "steps",
        "save_steps": 250,
        "save_total_limit": 4,
        "push_to_hub": True,
        "hub_model_id": "support-desk",
        "hub_strategy": "end",
        "remove_unused_columns": False,
        "seed": 1729,
    },
    "trainer/names_an_engine.json": {
        "output_dir": "results/pretraining",
        "deepspeed": "../engines/stage2_auto.json",
        "max_steps": 900,
        "warmup_steps": 45,
        "learning_rate": 8e-4,
        "adam_beta2": 0.95,
        "weight_decay": 0.2,
        "max_grad_norm": 2.0,
        "validation_split_percentage": 10,
        "eval_strategy": "steps",
        "eval_steps": 300,
        "block_size": 128,
        "save_strategy": "no",
        "dataloader_num_workers": 1,
    },
}

SCRIPT = """\
# Arguments of the script and the Trainer, written as people write YAML.
model_name_or_path:
  HuggingFaceTB/SmolLM2-360M
dataset_name: 'roneneldan/TinyStories'   # from the hub
run_name: "stories, first try"
learning_rate: 3e-4
lr_scheduler_type:
  cosine
bf16: yes
report_to: none
"""
"""Content of `trainer/script.yaml`."""
