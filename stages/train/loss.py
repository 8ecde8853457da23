"""The training loss: a sum over target tokens, to be normalised over the whole optimizer step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.artifacts import NO_TARGET
from stages.train.batches import MicroBatch
from stages.train.head import LossHead, install


class SummedLoss:
    """Cross-entropy in nats, summed over a batch's target tokens, computed in fp32; a scalar.

    With `chunk`, logits of so many tokens are in memory at a time. No attention mask is passed:
    padding is on the right, fast causal attention stays available, and with a mask, or a cache,
    transformers would overlook where packed documents begin.

    Calls raise StageError where chunks are of no use: for a model that computes something with its
    logits.
    """

    def __init__(self, model: nn.Module, chunk: int | None = None) -> None:
        self._model = model
        self._head: LossHead | None = None if chunk is None else install(model, chunk)

    def __call__(self, batch: MicroBatch) -> Tensor:
        if self._head is None:
            return self.in_full(batch)
        with self._head.taking(batch.labels):
            loss = self._logits(batch)
            self._head.require_given(loss)
            return loss

    def in_full(self, batch: MicroBatch) -> Tensor:
        """The same with all logits at once."""
        logits = self._logits(batch)
        return F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).to(torch.float32),
            batch.labels.reshape(-1),
            ignore_index=NO_TARGET,
            reduction="sum",
        )

    def _logits(self, batch: MicroBatch) -> Tensor:
        places = {} if batch.positions is None else {"position_ids": batch.positions}
        output: Any = self._model(input_ids=batch.input_ids, use_cache=False, **places)
        logits: Tensor = output.logits
        return logits
