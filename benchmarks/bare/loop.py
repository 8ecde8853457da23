"""The plain loop around a hand-written step."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.nn.functional as F
from overhead_data import SAMPLES, map_tokens
from overhead_job import SEED, STRATEGIES, Job
from torch import Tensor, nn

from pipeline.contracts.model import ModelSource
from pipeline.contracts.sample_order import SampleOrder
from pipeline.distributed.process_group import DistContext


class BareLoop:
    """Batches from a memory map, steps, and the loss at the end of a block."""

    def __init__(self, job: Job, dist: DistContext, source: ModelSource) -> None:
        strategy = STRATEGIES[job.strategy]
        make = importlib.import_module(strategy.bare).make
        total = job.total_steps
        self._train_step = make(
            plain_model(source), dist.device, job.compute, lambda step: cosine(step, total),
            **strategy.arguments,
        )  # fmt: skip
        self._job = job
        self._dist = dist
        self._tokens = map_tokens(job.folder)
        order = SampleOrder(SEED, SAMPLES).indices(0, job.total_steps * job.global_batch)
        mine = order.reshape(job.total_steps, dist.world_size, job.micro_batch)[:, dist.rank]
        self._batches = iter(mine)

    def run(self, steps: int) -> float:
        """Train `steps` steps; return the mean loss of the last one over all ranks."""
        loss = torch.zeros(())
        for _ in range(steps):
            loss = self._train_step(*self._batch(next(self._batches)))
        torch.distributed.all_reduce(loss)
        return loss.item() / self._dist.world_size

    def _batch(self, samples: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
        """Return inputs and labels, int64, both (micro-batch, length)."""
        length = self._job.length
        rows = [self._tokens[i * length : (i + 1) * length + 1] for i in samples.tolist()]
        batch = torch.from_numpy(np.stack(rows).astype(np.int64))
        if self._dist.device.type == "cuda":
            batch = batch.pin_memory().to(self._dist.device, non_blocking=True)
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def plain_model(source: ModelSource) -> nn.Module:
    """Return the source's module with its weights, on the CPU in fp32."""
    model = source.build()
    reader = source.weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(reader.read(name))
    return model.train()


def mean_loss(model: nn.Module, input_ids: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy in fp32, averaged over tokens; all are targets."""
    logits = model(input_ids=input_ids, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def cosine(step: int, total: int) -> float:
    """Return the factor on the learning rate, without warm-up, as `optimizer.adamw` schedules it by
    default."""
    return 0.5 * (1.0 + math.cos(math.pi * min((step + 1) / total, 1.0)))
