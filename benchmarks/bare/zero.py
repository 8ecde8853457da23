"""DeepSpeed by hand: `deepspeed.initialize`, its backward and step."""

from __future__ import annotations

from typing import Any

import torch
from overhead_job import CLIP, LR
from torch import Tensor, nn

from bare.loop import mean_loss
from bare.torch_step import Schedule, TrainStep


def configuration(stage: int, compute: str) -> dict[str, Any]:
    """Return DeepSpeed's defaults, with gradients reduced and summed in fp32 as our precision
    policy has it."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": compute == "bf16"},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def make(
    model: nn.Module, device: torch.device, compute: str, schedule: Schedule, *, stage: int
) -> TrainStep:
    """Hand the model to DeepSpeed; return its training step."""
    import deepspeed

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, fused=True)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, schedule),
        config=configuration(stage, compute),
        dist_init_required=False,
    )

    def step(input_ids: Tensor, labels: Tensor) -> Tensor:
        loss = mean_loss(engine, input_ids, labels)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
