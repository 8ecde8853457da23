"""One optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.contracts.engine import Engine, StepReport
from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.contracts.training import Progress
from pipeline.errors import StageError
from stages.train.anomalies import AnomalyMonitor
from stages.train.feed import BatchStats, Feed
from stages.train.loss import SummedLoss


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """A step that this rank took part in."""

    loss: Tensor
    """This rank's part of the mean loss, a scalar on the device."""
    report: StepReport
    lr: float | None
    """Learning rate of the step, before what groups of parameters add to it."""
    taken: BatchStats


def train_step(
    engine: Engine,
    loss: SummedLoss,
    feed: Feed,
    plan: OptimizerPlan,
    progress: Progress,
    watch: AnomalyMonitor,
) -> tuple[StepResult, str]:
    """One optimizer step: accumulate, clip and apply, advance. Returns what was done and what was
    anomalous about it; if anything was, progress is where it was. Raises StageError for a batch
    without targets."""
    targets = feed.targets(progress.samples)
    if targets == 0:
        raise StageError(f"step {progress.step + 1}: no target token in the whole batch")
    mean = _forward_backward(engine, loss, feed, progress.samples, targets)
    watch.look(mean, progress)
    scale = plan.lr_scale(progress.step, feed.total_steps(progress))
    report = engine.step(lr_scale=scale, should_step=watch.should_step)
    rate = plan.hyperparameters.get("lr")
    done = StepResult(
        loss=mean, report=report, lr=None if rate is None else rate * scale, taken=feed.taken
    )
    anomaly = watch.anomaly(report)
    if not anomaly:
        watch.passed(progress, applied=report.applied)
        progress.samples += feed.count(progress.samples)
        progress.step += 1
        progress.tokens += targets
        progress.skipped += not report.applied
        for name in ("eval_loss", "perplexity"):  # they were those of other weights
            progress.metrics.pop(name, None)
    return done, anomaly


def _forward_backward(
    engine: Engine, loss: SummedLoss, feed: Feed, position: int, targets: int
) -> Tensor:
    """Gradients of the step at `position`. Returns this rank's part of the mean loss, a scalar that
    is still on the device."""
    loss_sum = torch.zeros((), device=engine.device)
    for batch, last in feed.microbatches(position):
        with engine.microbatch(last=last):
            summed = loss(batch)
            engine.backward(summed * (engine.shard.count / targets))
        loss_sum += summed.detach()
    return loss_sum / targets
