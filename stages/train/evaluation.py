"""Loss on held-out samples, the best evaluation, and early stopping."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed

from pipeline import Data, DataAxis, DistContext, Engine, Progress
from pipeline.utils import plural
from stages.train.batches import collate, microbatches
from stages.train.loss import SummedLoss
from stages.train.settings import EarlyStopping


def evaluate(
    engine: Engine, loss: SummedLoss, data: Data, micro_batch_size: int, dist: DistContext
) -> float | None:
    """Mean loss in nats over all target tokens of the held-out samples (collective); None if a rank
    was asked to stop meanwhile."""
    engine.model.eval()
    with torch.no_grad(), engine.evaluating():
        mean = mean_loss(loss, data, engine.data_axis, engine.device, micro_batch_size, dist)
    engine.model.train()
    return mean


@torch.no_grad()
def mean_loss(
    loss: SummedLoss,
    data: Data,
    axis: DataAxis,
    device: torch.device,
    micro_batch_size: int,
    dist: DistContext | None = None,
) -> float | None:
    """Same as `evaluate`, for a model that is in evaluation mode already (collective). Without
    `dist` it does not end before the last sample."""
    assert data.heldout is not None
    total = torch.zeros((), dtype=torch.float32, device=device)
    targets = data.heldout.total_targets(np.arange(len(data.heldout)))
    for start, end in microbatches(len(data.heldout), axis, micro_batch_size):
        if dist is not None:
            dist.heartbeat.beat()
            if dist.any(dist.stop.asked):
                return None
        rows = [data.heldout[index] for index in range(start, end)]
        total += loss(collate(rows, data.pad_id, device))
    if axis.count > 1:
        torch.distributed.all_reduce(total)
    return float(total) / targets


def set_metric(progress: Progress, name: str, value: float) -> None:
    """Set a metric, or remove it if the value is not finite."""
    progress.metrics.pop(name, None)
    if math.isfinite(value):
        progress.metrics[name] = value


def record_evaluation(
    progress: Progress, loss: float, stopping: EarlyStopping | None
) -> dict[str, float]:
    """Record an evaluation of the current weights; returns its numbers. A loss that is not finite
    is neither the best nor an improvement."""
    record = {"eval_loss": loss, "perplexity": math.inf if loss > 709 else math.exp(loss)}
    for name, value in record.items():
        set_metric(progress, name, value)
    if math.isfinite(loss) and loss < progress.best.get("eval_loss", math.inf):
        progress.best = {"step": progress.step, "eval_loss": loss}
    if stopping is not None:
        patience = progress.patience
        if _improves(loss, patience.get("eval_loss"), stopping):
            progress.patience = {"eval_loss": loss, "evaluations": 0}
        else:
            evaluations = patience.get("evaluations", 0) + 1
            progress.patience = {**patience, "evaluations": evaluations}
    return record


def _improves(loss: float, known: float | None, stopping: EarlyStopping) -> bool:
    if known is None or not math.isfinite(loss):
        return math.isfinite(loss)
    return loss < known and known - loss >= stopping.min_improvement


def reason_to_stop(progress: Progress, stopping: EarlyStopping | None) -> str:
    """Reason for early stopping; empty if training goes on."""
    if stopping is None or progress.patience.get("evaluations", 0) < stopping.patience:
        return ""
    known = progress.patience.get("eval_loss")
    since = "was never a number" if known is None else f"has not improved on {known:.4f}"
    return f"eval_loss {since} in {plural(int(progress.patience['evaluations']), 'evaluation')}"
