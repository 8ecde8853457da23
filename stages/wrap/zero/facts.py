"""What a live DeepSpeed engine really is."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from stages.wrap.birth import dtype_names, parameter_count, trained
from stages.wrap.zero import compat

PADDING = 64
"""Elements that a parameter or group may be padded by, more than any alignment in use."""


def facts(live: Any) -> dict[str, Any]:
    """Read off the engine, its optimizers and its tensors; nothing is taken from a configuration
    when an object can tell."""
    optimizer = live.optimizer
    kept = compat.kept_elements(live.module)
    masters = compat.master_elements(optimizer)
    offload_optimizer, offload_param = compat.offload_devices(optimizer)
    return {
        "engine": type(live).__name__,
        "model": type(live.module).__name__,
        "zero_optimizer": type(optimizer).__name__,
        "optimizer": type(optimizer.optimizer).__name__,
        "zero_stage": compat.zero_stage(optimizer),
        "world_size": torch.distributed.get_world_size(optimizer.dp_process_group),
        "device": str(live.device).partition(":")[0],
        "master": dtype_names(compat.master_partitions(optimizer)),
        "compute": dtype_names(live.module.parameters()),
        "reduce": _name(compat.reduce_dtype(live)),
        "gradient_accumulation": _name(compat.accumulation_dtype(optimizer)),
        "buffers": dtype_names(live.module.buffers()),
        "offload_optimizer": offload_optimizer,
        "offload_param": offload_param,
        "max_grad_norm": optimizer.clip_grad or None,
        "accumulation": "managed" if live.managed_gradient_accumulation() else "unmanaged",
        "loss_scaling": compat.loss_scaler(live) is not None,
        "parameters": parameter_count(live.module, _elements),
        "trained_parameters": sum(_elements(p) for p in trained(live.module)),
        "kept_parameters": kept,
        "kept_masters": masters,
        "partitioned": _is_partitioned(live, masters),
    }


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else dtype_names([torch.empty(0, dtype=dtype)])[0]


def _elements(parameter: Any) -> int:
    """Of the whole parameter, also where it is partitioned."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _is_partitioned(live: Any, masters: int) -> bool:
    """Whether this rank's masters are its share of the trainable elements (plus padding)."""
    world = torch.distributed.get_world_size(live.optimizer.dp_process_group)
    trainable = list(trained(live.module))
    elements = sum(_elements(p) for p in trainable)
    return (
        masters * world >= elements
        and (masters - PADDING * (len(trainable) + 1)) * world <= elements
    )
