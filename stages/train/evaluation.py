"""Loss on held-out samples."""

from __future__ import annotations

import torch
import torch.distributed

from pipeline.artifacts import Data, Samples
from pipeline.engine import Engine
from stages.train.batches import collate, microbatches
from stages.train.loss import summed_loss


def evaluate(engine: Engine, data: Data, samples: Samples, micro_batch_size: int) -> float:
    """Mean loss in nats over all target tokens of `samples` (collective)."""
    engine.model.eval()
    total = torch.zeros((), dtype=torch.float32, device=engine.device)
    targets = sum(samples.targets(index) for index in range(len(samples)))
    with torch.no_grad():
        for start, end in microbatches(len(samples), engine.shard, micro_batch_size):
            rows = [samples[index] for index in range(start, end)]
            total += summed_loss(engine.model, collate(rows, data.pad_id, engine.device))
    engine.model.train()
    if engine.shard.count > 1:
        torch.distributed.all_reduce(total)
    return float(total) / targets
