"""DeepSpeed's JSON files by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AUTO_BATCH = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
FP16 = {
    "enabled": True,
    "initial_scale_power": 12,
    "loss_scale": 0,
    "loss_scale_window": 250,
    "min_loss_scale": 0.5,
    "hysteresis": 3,
}
PINNED = {"pin_memory": True, "device": "cpu"}
ALL_AUTO = dict.fromkeys(("weight_decay", "eps", "lr", "betas"), "auto")
WARM_UP_AUTO = dict.fromkeys(("warmup_num_steps", "warmup_max_lr", "warmup_min_lr"), "auto")
STAGE_3_AUTO = {
    "stage": 3,
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "reduce_bucket_size": "auto",
    "contiguous_gradients": True,
    "overlap_comm": True,
    "sub_group_size": 4e8,
    "stage3_max_reuse_distance": 6e8,
    "stage3_max_live_parameters": 7e8,
}

ENGINES: Mapping[str, Mapping[str, Any]] = {
    "engines/stage1_torch_adam.json": {
        "zero_optimization": {
            "stage": 1,
            "reduce_bucket_size": "auto",
            "allgather_bucket_size": 6e7,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "contiguous_gradients": True,
            "overlap_comm": True,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {
                "adam_w_mode": True, "torch_adam": True, "lr": "auto", "weight_decay": "auto",
            },
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {**WARM_UP_AUTO, "total_num_steps": "auto"},
        },
        "fp16": FP16,
        **AUTO_BATCH,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 40,
        "wall_clock_breakdown": False,
    },
    "engines/stage1_numbers.json": {
        "gradient_accumulation_steps": 4,
        "train_micro_batch_size_per_gpu": 6,
        "train_batch_size": 96,
        "gradient_clipping": 0.5,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 2.5e-4, "betas": [0.85, 0.98], "eps": 1e-7, "weight_decay": 0.03},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 2.5e-4, "warmup_min_lr": 0, "warmup_num_steps": 150},
        },
        "fp16": FP16,
        "zero_optimization": {
            "stage": 1, "allgather_bucket_size": 90_000_000, "reduce_bucket_size": 120_000_000,
        },
        "steps_per_print": 25,
    },
    "engines/stage2_auto.json": {
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": 3e8,
            "allgather_bucket_size": 1.5e8,
            "contiguous_gradients": True,
            "overlap_comm": False,
            "reduce_scatter": True,
            "allgather_partitions": True,
            "offload_optimizer": PINNED,
        },
        "bf16": {"enabled": "auto"},
        "fp16": {**FP16, "enabled": "auto"},
        "scheduler": {"type": "WarmupLR", "params": WARM_UP_AUTO},
        "optimizer": {"type": "AdamW", "params": ALL_AUTO},
        **AUTO_BATCH,
        "steps_per_print": 500,
        "wall_clock_breakdown": False,
    },
    "engines/stage2_numbers.json": {
        "bf16": {"enabled": True},
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.8,
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": 30_000, "warmup_num_steps": 600,
                "warmup_max_lr": 1.5e-4, "warmup_min_lr": 0,
            },
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"weight_decay": 0.05, "eps": 1e-6, "betas": [0.9, 0.97], "lr": 1.5e-4},
        },
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "reduce_scatter": True,
            "contiguous_gradients": False,
            "allgather_bucket_size": 80_000_000,
            "reduce_bucket_size": 70_000_000,
        },
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
    },
    "engines/stage3_numbers.json": {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 6e-5, "weight_decay": 1e-3, "betas": [0.88, 0.96], "eps": 1e-9},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 75, "warmup_min_lr": 0, "warmup_max_lr": 6e-5},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_param": PINNED,
            "offload_optimizer": PINNED,
            "reduce_bucket_size": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 2e9,
            "stage3_max_reuse_distance": 2e9,
            "sub_group_size": 5e12,
            "stage3_gather_fp16_weights_on_model_save": True,
            "overlap_comm": False,
            "contiguous_gradients": True,
        },
        "fp16": FP16,
        "wall_clock_breakdown": False,
        "steps_per_print": 300,
    },
    "engines/stage3_auto.json": {
        "zero_optimization": {
            **STAGE_3_AUTO,
            "offload_param": PINNED,
            "offload_optimizer": PINNED,
            "stage3_gather_fp16_weights_on_model_save": False,
        },
        "bfloat16": {"enabled": "auto"},
        "scheduler": {"type": "WarmupLR", "params": WARM_UP_AUTO},
        "optimizer": {"type": "AdamW", "params": ALL_AUTO},
        **AUTO_BATCH,
        "wall_clock_breakdown": False,
        "steps_per_print": 80,
    },
    "engines/stage3_offload.json": {
        "zero_optimization": {
            **STAGE_3_AUTO,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu", "pin_memory": False},
            "stage3_gather_16bit_weights_on_model_save": "auto",
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {**WARM_UP_AUTO, "total_num_steps": "auto"},
        },
        "optimizer": {"type": "AdamW", "params": {"weight_decay": "auto", "lr": "auto"}},
        "fp16": FP16,
        **AUTO_BATCH,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 60,
    },
}  # fmt: skip
