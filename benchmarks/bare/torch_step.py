"""The parts that plain torch loops share: AdamW, its schedule, clipping."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from overhead_job import CLIP, LR
from torch import Tensor, nn

from bare.loop import mean_loss

TrainStep = Callable[[Tensor, Tensor], Tensor]
"""(input ids, labels) -> this rank's mean loss, detached."""
Schedule = Callable[[int], float]


def torch_step(
    model: nn.Module,
    schedule: Schedule,
    forward: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
) -> TrainStep:
    """Return the step of every tutorial."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

    def step(input_ids: Tensor, labels: Tensor) -> Tensor:
        with forward():
            loss = mean_loss(model, input_ids, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
