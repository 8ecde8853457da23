"""Keys of tools whose files are not imported, by the recipe key that says the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.importing import KeyOutcome

KEYS: Mapping[str, str] = {
    # torchrun, SkyPilot, Lightning
    **dict.fromkeys(
        ("gpus", "num_gpus", "n_gpus", "devices", "nproc_per_node", "nprocs", "world_size"),
        "launch.procs",
    ),
    **dict.fromkeys(("nnodes", "num_nodes"), "launch.nodes"),
    "accelerator": "launch.device",
    **dict.fromkeys(("lora", "peft", "peft_config"), "adapter.use"),
    "qlora": "adapter.quantize",
    "completion_only_loss": "data.loss",  # of TRL, where the rows' form does not matter
    "strategy": "wrap.use",
    "max_epochs": "train.epochs",
    "accumulate_grad_batches": "train.accumulation",
    "gradient_clip_val": "optimizer.max_grad_norm",
    "every_n_train_steps": "checkpoint.every",
    # torchtitan
    "local_batch_size": "train.micro_batch_size",
    "max_norm": "optimizer.max_grad_norm",
    "data_parallel_shard_degree": "wrap.shard_size",
    "tensor_parallel_degree": "wrap.tensor_parallel.size",
    "pipeline_parallel_degree": "wrap.pipeline_parallel.size",
    "context_parallel_degree": "wrap.context_parallel.size",
    "expert_parallel_degree": "wrap.expert_parallel.size",
    "seq_len": "data.sequence_length",
    "keep_latest_k": "checkpoint.keep",
    # NeMo, Megatron
    "tp_size": "wrap.tensor_parallel.size",
    "pp_size": "wrap.pipeline_parallel.size",
    "cp_size": "wrap.context_parallel.size",
    "ep_size": "wrap.expert_parallel.size",
    "train_iters": "train.steps",
    "clip_grad": "optimizer.max_grad_norm",
    "seq_length": "data.sequence_length",
}
STRATEGIES = {"ddp": "wrap.ddp", "fsdp": "wrap.fsdp", "deepspeed": "wrap.zero"}
"""Beginnings of names of strategies, as in Lightning's `deepspeed_stage_3`."""


def outcome(key: str, value: Any) -> KeyOutcome | None:
    """Return what a recipe makes of a key; None if no tool here has it."""
    if key == "batch_size":  # of a device in some tools, of all in others
        both = f"per device: `micro_batch_size: {value}`, over all: `global_batch_size: {value}`"
        return KeyOutcome(outcome="not translated", why=both)
    if key == "zero_optimization":
        how = "its fields stand in the slot `wrap` itself, as in `stage: 3`"
        hint = f"{how}; pipe import translates DeepSpeed's files"
        return KeyOutcome(outcome="not translated", hint=hint)
    to = KEYS.get(key)
    if to == "wrap.use":
        value = next((use for name, use in STRATEGIES.items() if str(value).startswith(name)), None)
    if to == "adapter.use":
        value = "adapter.lora" if value else None
    if to == "adapter.quantize":
        value = "nf4" if value else None
    if to == "data.loss":
        value = "completion" if value else "all"
    return None if to is None else KeyOutcome(outcome="translated", to={to: value})
