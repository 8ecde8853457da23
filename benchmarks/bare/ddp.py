"""DistributedDataParallel by hand, under torch's autocast below fp32."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bare.torch_step import Schedule, TrainStep, torch_step
from pipeline.contracts.optimizer import torch_dtype
from stages.wrap.torch_compat import no_buffer_sync


def make(model: nn.Module, device: torch.device, compute: str, schedule: Schedule) -> TrainStep:
    """Replicate the model; return its training step."""
    replicated = DistributedDataParallel(
        model.to(device),
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **no_buffer_sync(),
    )
    dtype = torch_dtype(compute)

    def autocast() -> contextlib.AbstractContextManager[object]:
        if dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype)

    return torch_step(replicated, schedule, autocast)
