"""Micro-batches, and engines run on them with the loss of `train.causal_lm`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pipeline.contracts.data import MicroBatch
from pipeline.contracts.engine import Engine
from pipeline.contracts.objective import Objective
from stages.objectives.compat import flash_documents
from stages.objectives.cross_entropy import CrossEntropy, RowLoss, judged
from stages.objectives.scoring import ModelScorer


def micro_batch(
    input_ids: Tensor,
    labels: Tensor,
    *,
    positions: Tensor | None = None,
    real: Tensor | None = None,
    **fields: Any,
) -> MicroBatch:
    """Return a micro-batch of these tensors, shape (lines, length)."""
    given = {"input_ids": input_ids, "labels": labels, "positions": positions, "real": real}
    return MicroBatch(tokens={k: v for k, v in given.items() if v is not None}, **fields)


def summed_loss(
    model: Any, batch: MicroBatch, objective: Objective | None = None, **how: Any
) -> Tensor:
    """Return the summed loss of a model outside of any engine; `how` are fields of CrossEntropy."""
    parts = judged(objective or CrossEntropy(**how), ModelScorer(model), batch, batch)
    (loss,) = parts.terms.values()
    return loss


def accumulated(
    engine: Engine,
    batches: Iterable[MicroBatch],
    targets: float,
    objective: Objective | None = None,
) -> Tensor:
    """Run forward and backward of a step; return this rank's part of the summed loss."""
    objective = objective or CrossEntropy()
    counts: Any = dict.fromkeys(objective.units, targets)
    (loss,) = engine.accumulate(batches, objective, counts=counts).terms.values()
    return loss


def evaluated(
    engine: Engine,
    batches: Iterable[MicroBatch],
    chunk: int | None = None,
    compiled_by: str | None = None,
) -> Tensor:
    """Return this rank's part of the summed loss without gradients."""
    total = torch.zeros((), device=engine.device)
    for rows in engine.evaluate(batches, RowLoss(chunk, compiled_by=compiled_by)):
        if rows is not None:
            total += rows.sum()
    return total


def logits_of(model: Any, batch: MicroBatch) -> Tensor:
    """Return the logits of all tokens, computed by a model outside of any engine."""
    places = {}
    if batch.positions is not None:
        documents = flash_documents(model, batch.positions)
        places = {"position_ids": batch.positions, **documents}
    logits: Tensor = model(input_ids=batch.input_ids, use_cache=False, **places).logits
    return logits
