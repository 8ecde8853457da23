"""Loss on held-out samples, and what follows from it."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed

from pipeline.contracts.data import Data, Samples
from pipeline.contracts.engine import DataAxis, Engine
from pipeline.contracts.training import Progress
from stages.train.batches import collate, microbatches
from stages.train.loss import SummedLoss
from stages.train.policies import EarlyStopping


def evaluate(
    engine: Engine, loss: SummedLoss, data: Data, samples: Samples, micro_batch_size: int
) -> float:
    """Mean loss in nats over all target tokens of `samples` (collective)."""
    engine.model.eval()
    with torch.no_grad(), engine.evaluating():
        mean = mean_loss(loss, data, samples, engine.shard, engine.device, micro_batch_size)
    engine.model.train()
    return mean


def mean_loss(
    loss: SummedLoss,
    data: Data,
    samples: Samples,
    shard: DataAxis,
    device: torch.device,
    micro_batch_size: int,
) -> float:
    """The same of a model that is in the state in which it is to be measured (collective)."""
    total = torch.zeros((), dtype=torch.float32, device=device)
    targets = samples.total_targets(np.arange(len(samples)))
    with torch.no_grad():
        for start, end in microbatches(len(samples), shard, micro_batch_size):
            rows = [samples[index] for index in range(start, end)]
            total += loss(collate(rows, data.pad_id, device))
    if shard.count > 1:
        torch.distributed.all_reduce(total)
    return float(total) / targets


def perplexity(loss: float) -> float:
    """exp of a mean loss in nats; infinite where that is beyond a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def note(progress: Progress, loss: float, stopping: EarlyStopping | None) -> None:
    """Let the progress have what an evaluation of its weights says. A loss that is not finite is no
    best and no improvement."""
    for name, value in (("eval_loss", loss), ("perplexity", perplexity(loss))):
        progress.metrics.pop(name, None)
        if math.isfinite(value):
            progress.metrics[name] = value
    if math.isfinite(loss) and loss < progress.best.get("eval_loss", math.inf):
        progress.best = {"step": progress.step, "eval_loss": loss}
    if stopping is not None:
        progress.patience = _after(progress.patience, loss, stopping)


def _after(patience: dict[str, float], loss: float, stopping: EarlyStopping) -> dict[str, float]:
    """The state of early stopping after another evaluation."""
    known = patience.get("eval_loss")
    if math.isfinite(loss) and (known is None or _improves(loss, known, stopping)):
        return {"eval_loss": loss, "evaluations": 0}
    return {**patience, "evaluations": patience.get("evaluations", 0) + 1}


def _improves(loss: float, known: float, stopping: EarlyStopping) -> bool:
    return loss < known and known - loss >= stopping.min_improvement


def reason_to_stop(progress: Progress, stopping: EarlyStopping | None) -> str:
    """Why training is to end now; empty if it is not."""
    if stopping is None or progress.patience.get("evaluations", 0) < stopping.patience:
        return ""
    known = progress.patience.get("eval_loss")
    since = "was never a number" if known is None else f"has not improved on {known:.4f}"
    count = int(progress.patience["evaluations"])
    return f"eval_loss {since} in {count} evaluation{'s' * (count > 1)}"
