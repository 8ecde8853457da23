"""Loss on held-out samples, the best evaluation, and early stopping."""

from __future__ import annotations

import contextlib
import math

import numpy as np

from pipeline import Data, DistContext, Engine, Measure, Progress, StageError
from pipeline.utils import plural
from stages.objectives.rows import rows_in_order
from stages.train.settings import EarlyStopping


def evaluate(
    engine: Engine,
    measure: Measure,
    data: Data,
    micro_batch_size: int,
    dist: DistContext,
    vocabulary: int | None = None,
) -> float | None:
    """Mean over all target tokens of the held-out samples of the first number that `measure` has
    for each row, its loss in nats (collective); None if a rank was asked to stop meanwhile. Raises
    DataError for a sample that is not as the set says, or has a token outside of the
    `vocabulary`."""
    assert data.heldout is not None
    total, samples = 0.0, data.heldout
    blocks = rows_in_order(
        engine, measure, data, samples, micro_batch_size, dist, vocabulary=vocabulary
    )
    with contextlib.closing(blocks):
        for rows in blocks:
            if rows is None:
                return None
            total += float(rows[:, 0].sum())
    return total / heldout_targets(data)


def heldout_targets(data: Data) -> int:
    """Target tokens of all held-out samples. Raises StageError if there are none."""
    assert data.heldout is not None
    found = data.heldout.total_targets(np.arange(len(data.heldout)))
    if not found:
        raise StageError("no held-out sample has a target token, so there is nothing to evaluate")
    return found


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
    """Reason for early stopping; empty if training continues."""
    if stopping is None or progress.patience.get("evaluations", 0) < stopping.patience:
        return ""
    known = progress.patience.get("eval_loss")
    since = "was never a number" if known is None else f"has not improved on {known:.4f}"
    return f"eval_loss {since} in {plural(int(progress.patience['evaluations']), 'evaluation')}"
