"""One optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline import Engine, Heartbeat, OptimizerPlan, Progress, StageError, StepReport
from stages.train.anomalies import AnomalyMonitor
from stages.train.batches import BatchStats, Feed
from stages.train.loss import SummedLoss


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of a step on this rank."""

    loss: Tensor
    """This rank's part of the mean loss, a scalar on the device."""
    report: StepReport
    lr: float
    """Learning rate of the step, before the ratios of parameter groups; NaN if there is none."""
    stats: BatchStats
    anomaly: str
    """Description of an anomaly, after which `progress` has not moved; empty if there is none."""


def advance(progress: Progress, feed: Feed) -> None:
    """Advance `progress` past the step at its position."""
    position = progress.samples
    progress.tokens += feed.targets(position)
    progress.samples += feed.count(position)
    progress.step += 1
    for name in ("eval_loss", "perplexity"):  # of the weights before the update
        progress.metrics.pop(name, None)


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """Accumulates gradients, clips and applies them, and advances the progress."""

    engine: Engine
    loss: SummedLoss
    feed: Feed
    plan: OptimizerPlan
    monitor: AnomalyMonitor
    heartbeat: Heartbeat

    def __call__(self, progress: Progress) -> StepResult:
        """Take the step after `progress` (collective). Raises StageError without targets."""
        feed, monitor, position = self.feed, self.monitor, progress.samples
        targets = feed.targets(position)
        if targets == 0:
            raise StageError(f"step {progress.step + 1}: no target token in the whole batch")
        loss, stats = self._forward_backward(position, targets)
        monitor.observe(loss, progress)
        scale = self.plan.lr_scale(progress.step, feed.total_steps(progress))
        report = self.engine.step(lr_scale=scale, should_step=monitor.should_step)
        anomaly = monitor.anomaly(report)
        if not anomaly:
            monitor.record(progress, applied=report.applied)
            progress.skipped += not report.applied
            advance(progress, feed)
        lr = self.plan.hyperparameters.get("lr", math.nan) * scale
        return StepResult(loss=loss, report=report, lr=lr, stats=stats, anomaly=anomaly)

    def _forward_backward(self, position: int, targets: int) -> tuple[Tensor, BatchStats]:
        """Accumulate gradients of the step at `position`. Returns this rank's part of the mean
        loss, a scalar on the device, and statistics of its micro-batches."""
        engine, stats = self.engine, BatchStats()
        total = torch.zeros((), device=engine.device)
        for batch, last, taken in self.feed.microbatches(position):
            self.heartbeat.beat()
            stats += taken
            with engine.microbatch(last=last):
                summed = self.loss(batch)
                engine.backward(summed * (engine.data_axis.count / targets))
            total += summed.detach()
        return total / targets, stats
