"""fully_shard by hand: each block, then the root, with torch's default resharding."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bare.torch_step import Schedule, TrainStep, torch_step
from pipeline.contracts.optimizer import torch_dtype


def make(model: nn.Module, device: torch.device, compute: str, schedule: Schedule) -> TrainStep:
    """Shard the model; return its training step."""
    model = model.to(device)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch_dtype(compute), reduce_dtype=torch.float32)
    for block in model.get_submodule("model.layers").children():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return torch_step(model, schedule)
