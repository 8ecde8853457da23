"""Configurations that accelerate and transformers write themselves, by file name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.distributed.process_group import DistContext

FSDP1 = {
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_forward_prefetch": False,
    "fsdp_use_orig_params": True,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_sync_module_states": True,
    "fsdp_offload_params": False,
    "fsdp_activation_checkpointing": False,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
}
FSDP2 = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": False,
    "fsdp_activation_checkpointing": False,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
}
PLUGIN = {
    "zero_stage": 3,
    "zero3_init_flag": True,
    "zero3_save_16bit_model": True,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.9,
    "deepspeed_multinode_launcher": "standard",
}
PLUGIN_FILE = {
    "deepspeed_config_file": "../engines/stage1_torch_adam.json",
    "zero3_init_flag": False,
}
CLUSTERS: dict[str, dict[str, Any]] = {
    "fsdp1": {"distributed_type": "FSDP", "mixed_precision": "no", "fsdp_config": FSDP1},
    "fsdp2": {
        "distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 6,
        "fsdp_config": FSDP2,
    },
    "plugin": {
        "distributed_type": "DEEPSPEED", "mixed_precision": "fp16", "num_processes": 4,
        "deepspeed_config": PLUGIN,
    },
    "plugin_file": {
        "distributed_type": "DEEPSPEED", "mixed_precision": None, "num_processes": 2,
        "deepspeed_config": PLUGIN_FILE,
    },
}  # fmt: skip
"""Name in `launch/` -> arguments of accelerate's ClusterConfig."""

ARGUMENTS: dict[str, dict[str, Any]] = {
    "arguments": {
        "bf16": True, "per_device_train_batch_size": 3, "learning_rate": 7e-5, "warmup_steps": 0.05,
        "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.2},
        "gradient_accumulation_steps": 4, "optim": "adamw_torch", "save_total_limit": 2,
    },
    "sharded_arguments": {
        "fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": False},
        "max_steps": 400, "weight_decay": 0.02, "lr_scheduler_type": "constant_with_warmup",
    },
}  # fmt: skip
"""Name in `trainer/` -> arguments of transformers' TrainingArguments."""


def write_with_tools(dist: DistContext, folder: str) -> None:
    """Have the tools write files below `folder`, in a separate process because they keep global
    state."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.config.default import write_basic_config
    from transformers import TrainingArguments

    for name, more in CLUSTERS.items():
        config = ClusterConfig(
            compute_environment="LOCAL_MACHINE", use_cpu=False, debug=False, **more
        )
        config.to_yaml_file(Path(folder, "launch", f"{name}.yaml"))
    write_basic_config("bf16", str(Path(folder, "launch/basic.json")))
    for name, more in ARGUMENTS.items():
        arguments = TrainingArguments(output_dir=f"results/{name}", use_cpu=True, **more)
        path = Path(folder, "trainer", f"{name}.json")
        path.write_text(arguments.to_json_string(), encoding="utf-8")
