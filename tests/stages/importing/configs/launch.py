"""Files of `accelerate config` by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAUNCH: Mapping[str, Mapping[str, Any]] = {
    "launch/ddp.yaml": {
        "distributed_type": "MULTI_GPU",
        "num_processes": 4,
        "mixed_precision": "no",
        "gpu_ids": "all",
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": 1,
        "machine_rank": 0,
        "main_process_port": 29611,
        "rdzv_backend": "c10d",
        "same_network": True,
        "main_training_function": "train",
        "debug": False,
        "use_cpu": False,
        "downcast_bf16": "no",
        "tpu_env": [],
        "tpu_use_cluster": False,
        "tpu_use_sudo": False,
    },
    "launch/fsdp1_without_processes.yaml": {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_sharding_strategy": "SHARD_GRAD_OP",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "FULL_STATE_DICT",
            "fsdp_backward_prefetch": "BACKWARD_POST",
            "fsdp_forward_prefetch": True,
            "fsdp_use_orig_params": False,
            "fsdp_sync_module_states": False,
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_activation_checkpointing": False,
            "fsdp_offload_params": True,
        },
    },
    "launch/one_process.yaml": {
        "distributed_type": "NO",
        "num_processes": 1,
        "num_machines": 1,
        "mixed_precision": "bf16",
        "fsdp_config": {},
        "deepspeed_config": {},
        "megatron_lm_config": {},
        "main_process_ip": None,
        "main_process_port": None,
        "gpu_ids": "all",
        "tpu_name": "pod-of-ours",
        "tpu_zone": "europe-west4-b",
        "command": ["pip install --user rich", "nvidia-smi"],
        "command_file": "before_training.sh",
    },
}
