"""One optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from pipeline import (
    Engine,
    Heartbeat,
    MicroBatch,
    Objective,
    OptimizerPlan,
    Progress,
    StageError,
    StepReport,
    Unit,
)
from stages.batches.feed import BatchStats, Feed
from stages.train.anomalies import AnomalyMonitor

UNITS: Mapping[Unit, str] = {"targets": "target token", "rows": "row", "groups": "group of rows"}


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of a step on this rank."""

    report: StepReport
    rates: Mapping[str, float]
    """Learning rates of the step, by name of metric (`OptimizerPlan.rates`)."""
    stats: BatchStats
    anomaly: str
    """Description of an anomaly against which the update was guarded, and after which `progress`
    has not moved; empty if there is none."""


def advance(progress: Progress, feed: Feed) -> None:
    """Advance `progress` past the step at its position."""
    position = progress.samples
    progress.tokens += feed.counts(position)["targets"]
    progress.samples += feed.count(position)
    progress.step += 1
    for name in ("eval_loss", "perplexity"):  # of the weights before the update
        progress.metrics.pop(name, None)


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """Accumulates gradients, clips and applies them, and advances the progress."""

    engine: Engine
    objective: Objective
    feed: Feed
    plan: OptimizerPlan
    monitor: AnomalyMonitor
    observe: Callable[[Tensor, BatchStats, Mapping[str, Tensor]], None]
    """Takes this rank's part of the step's mean loss, its batch statistics, and its parts of the
    objective's metrics, before the update (collective)."""
    heartbeat: Heartbeat

    def __call__(self, progress: Progress) -> StepResult:
        """Take the step after `progress` (collective). Raises StageError without anything that the
        loss is divided by."""
        feed, monitor, position = self.feed, self.monitor, progress.samples
        units, metrics = self.objective.units, self.objective.metrics
        counts = feed.counts(position, {*units, *metrics.values()})
        for unit in units:
            if not counts[unit]:
                what = UNITS[unit]
                raise StageError(f"step {progress.step + 1}: no {what} in the whole batch")
        taken: list[BatchStats] = []
        batches = self._batches(progress, taken)
        parts = self.engine.accumulate(batches, self.objective, counts=counts)
        loss, *more = (parts.terms[unit] / counts[unit] for unit in units)
        loss = sum(more, loss)
        stats = sum(taken, BatchStats())
        monitor.observe(loss, progress)
        measured = {name: parts.sums[name] / counts[unit] for name, unit in metrics.items()}
        self.observe(loss, stats, measured)
        scales = self.plan.lr_scales(progress.step, feed.total_steps(progress))
        guard = monitor.should_step
        report = self.engine.step(lr_scales=scales, should_step=guard)
        anomaly = "" if guard is None else monitor.anomaly(report)
        if not anomaly:
            monitor.record(progress, applied=report.applied)
            progress.skipped += not report.applied
            advance(progress, feed)
        rates = self.plan.rates(scales)
        return StepResult(report=report, rates=rates, stats=stats, anomaly=anomaly)

    def _batches(self, progress: Progress, taken: list[BatchStats]) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the next step; adds their statistics to `taken`."""
        left = self.feed.total_steps(progress) - progress.step
        for batch, stats in self.feed.microbatches(progress.samples, left=left):
            self.heartbeat.beat()
            taken.append(stats)
            yield batch
