"""The training loss: a sum over target tokens, to be normalised over the whole optimizer step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.artifacts import NO_TARGET
from stages.train.batches import MicroBatch


def summed_loss(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Cross-entropy in nats, summed over the batch's target tokens, computed in fp32; a scalar.

    No attention mask is passed: padding is on the right, fast causal attention stays available, and
    with a mask, or a cache, transformers would overlook where packed documents begin.
    """
    places = {} if batch.positions is None else {"position_ids": batch.positions}
    output: Any = model(input_ids=batch.input_ids, use_cache=False, **places)
    logits = output.logits
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).to(torch.float32),
        batch.labels.reshape(-1),
        ignore_index=NO_TARGET,
        reduction="sum",
    )
