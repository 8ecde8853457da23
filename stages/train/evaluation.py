"""Measurements of each row of a sample set; the held-out loss, its best, and early stopping."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Generator, Iterator

import numpy as np
import torch
from torch import Tensor

from pipeline import (
    Data,
    DistContext,
    Engine,
    Measure,
    MicroBatch,
    Progress,
    Samples,
    StageError,
)
from pipeline.utils import plural
from stages.batches.feed import microbatch_ranges
from stages.batches.samples import micro_batch
from stages.train.settings import EarlyStopping

BLOCK = 16
"""Micro-batches on each rank whose results are shared at once."""


def rows_in_order(
    engine: Engine, measure: Measure, data: Data, samples: Samples, micro_batch_size: int,
    dist: DistContext, layout: Callable[[MicroBatch], MicroBatch] = lambda batch: batch, *,
    vocabulary: int | None = None,
) -> Generator[Tensor | None]:  # fmt: skip
    """Yield what `measure` says of each row of one of the data's sets, in order and block by block,
    on every rank; shape (rows, width), fp64 (collective). None, the last one, if a rank was asked
    to stop, after which no micro-batch is read. `layout` changes each micro-batch before it is
    measured. Tokens are compared with the size of the `vocabulary`, if that is given. Raises
    DataError for a sample that is not as the set says."""
    axis, total = engine.data_axis, len(samples)
    step = axis.count * micro_batch_size * BLOCK
    blocks = [(start, min(start + step, total)) for start in range(0, total, step)]
    shares = [
        [(a + start, a + end) for start, end in microbatch_ranges(b - a, axis, micro_batch_size)]
        for a, b in blocks
    ]
    stopped = False

    def batches() -> Iterator[MicroBatch]:
        nonlocal stopped
        for start, end in itertools.chain.from_iterable(shares):
            dist.heartbeat.beat()
            stopped = dist.any(dist.stop.asked)
            if stopped:
                return
            indices = range(start, end)
            yield layout(micro_batch(data, samples, indices, 0, engine.device, vocabulary)[0])

    with contextlib.closing(engine.evaluate(batches(), measure)) as results:
        for (first, last), share in zip(blocks, shares, strict=True):
            place = samples.total_rows(np.arange(first, share[0][0]))
            rows = place + samples.total_rows(np.arange(share[0][0], last))
            found = torch.zeros(rows, measure.width, dtype=torch.float64, device=engine.device)
            for part in itertools.islice(results, len(share)):
                if part is not None:
                    found[place : place + len(part)] = part
                    place += len(part)
            if stopped:
                yield None
                return
            yield engine.total(found)


def evaluate(
    engine: Engine, measure: Measure, data: Data, micro_batch_size: int, dist: DistContext,
    vocabulary: int | None = None,
) -> float | None:  # fmt: skip
    """Mean over all target tokens of the held-out samples of the first number that `measure` has
    for each row, its loss in nats (collective); None if a rank was asked to stop meanwhile. Raises
    DataError for a sample that is not as the set says, or has a token outside of the
    `vocabulary`."""
    assert data.heldout is not None
    total, size = 0.0, micro_batch_size
    blocks = rows_in_order(engine, measure, data, data.heldout, size, dist, vocabulary=vocabulary)
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
    finite = math.isfinite(loss)
    if finite and loss < progress.best.get("eval_loss", math.inf):
        progress.best = {"step": progress.step, "eval_loss": loss}
    if stopping is not None:
        patience = progress.patience
        known = patience.get("eval_loss", math.inf)
        if finite and loss < known and known - loss >= stopping.min_improvement:
            progress.patience = {"eval_loss": loss, "evaluations": 0}
        else:
            evaluations = patience.get("evaluations", 0) + 1
            progress.patience = {**patience, "evaluations": evaluations}
    return record


def reason_to_stop(progress: Progress, stopping: EarlyStopping | None) -> str:
    """Reason for early stopping; empty if training continues."""
    if stopping is None or progress.patience.get("evaluations", 0) < stopping.patience:
        return ""
    known = progress.patience.get("eval_loss")
    since = "was never a number" if known is None else f"has not improved on {known:.4f}"
    return f"eval_loss {since} in {plural(int(progress.patience['evaluations']), 'evaluation')}"
