"""One optimizer step: taken, and measured on the device, with numbers that come later."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed
from torch import Tensor

from pipeline import (
    DistContext,
    Engine,
    MicroBatch,
    Objective,
    OptimizerPlan,
    Progress,
    StageError,
    StepReport,
    Unit,
)
from pipeline.hardware import peak_beyond
from pipeline.utils import HostCopy
from stages.batches.feed import BatchStats, Feed
from stages.train.anomalies import AnomalyMonitor
from stages.train.report import step_record
from stages.train.speed import Cost, Profile

UNITS: Mapping[Unit, str] = {"targets": "target token", "rows": "row", "groups": "group of rows"}
PEAKS = ("peak_memory_bytes", "peak_host_memory_bytes")
OTHERS = ("step", "eval_loss", "perplexity")
"""Further names in `metrics.jsonl`."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of a step on this rank."""

    report: StepReport
    rates: Mapping[str, float]
    """Learning rates of the step, by name of metric (`OptimizerPlan.rates`)."""
    stats: BatchStats
    sums: HostCopy
    """Sums over all ranks, on the way, as `StepMeter.start_reduction` lays them out."""
    metrics: Sequence[str] = ()
    """Names of the objective's metrics."""
    anomaly: str = ""
    """Description of an anomaly against which the update was guarded, and after which `progress`
    has not moved; empty if there is none."""


def advance(progress: Progress, feed: Feed) -> None:
    """Advance `progress` past the step at its position."""
    position = progress.samples
    progress.tokens += feed.unit_counts(position)["targets"]
    progress.samples += feed.samples_in_step(position)
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
    meter: StepMeter

    def __call__(self, progress: Progress) -> StepResult:
        """Take the step after `progress` (collective). Raises StageError without anything that the
        loss is divided by."""
        feed, monitor, steps = self.feed, self.monitor, self.feed.total_steps(progress)
        units, metrics = self.objective.units, self.objective.metrics
        counts = feed.unit_counts(progress.samples, {*units, *metrics.values()})
        for unit in units:
            if not counts[unit]:
                what = UNITS[unit]
                raise StageError(f"step {progress.step + 1}: no {what} in the whole batch")
        batch_stats: list[BatchStats] = []

        def batches() -> Iterator[MicroBatch]:
            for batch, stats in feed.microbatches(progress.samples, left=steps - progress.step):
                self.meter.dist.heartbeat.beat()
                batch_stats.append(stats)
                yield batch

        parts = self.engine.accumulate(batches(), self.objective, counts=counts)
        loss, *more = (parts.terms[unit] / counts[unit] for unit in units)
        loss = sum(more, loss)
        stats = BatchStats(*map(sum, zip(*batch_stats, strict=True)))
        monitor.observe(loss, progress)
        measured = [parts.sums[name] / counts[unit] for name, unit in metrics.items()]
        sums = self.meter.start_reduction(loss, stats, measured)
        scales = self.plan.lr_scales(progress.step, steps)
        guard = monitor.guard
        report = self.engine.step(lr_scales=scales, should_step=guard)
        anomaly = "" if guard is None else monitor.anomaly(report)
        if not anomaly:
            monitor.record(progress, applied=report.applied)
            progress.skipped += not report.applied
            advance(progress, feed)
        return StepResult(
            report=report, rates=self.plan.rates(scales), stats=stats, sums=sums,
            metrics=(*metrics,), anomaly=anomaly,
        )  # fmt: skip


class Moment:
    """The moment at which a device has done what it was given before; on a CPU, now."""

    def __init__(self, device: torch.device) -> None:
        self._host, self._event = time.perf_counter(), None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def since(self, earlier: Moment) -> float:
        """Seconds from an earlier moment of the same device; waits until this one has come."""
        if self._event is None:
            return self._host - earlier._host
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1000  # type: ignore[union-attr]


class Maxima(NamedTuple):
    """The greatest of all ranks' peaks of memory in bytes (0: not known), of torch's tensors on a
    GPU and of host memory for the model and its training; and 1 if any was asked to stop."""

    gpu: int
    host: int
    stop: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PendingStep:
    """A step that the device was given, and its numbers, which may be on the way."""

    before: Progress
    progress: Progress
    """Progress as of the step: the training's own may be further on."""
    result: StepResult
    profile: Profile | None
    time: float
    """Seconds since 1970 at which the host was done with it."""
    began: Moment
    ended: Moment
    trained: tuple[int, int]
    """Target tokens and samples of the time between."""
    peaks: Tensor
    """The ranks' maxima, once `peaks_asked` is done."""
    peaks_asked: torch.distributed.Work | None

    def maxima(self) -> Maxima:
        """Return the greatest of all ranks' numbers; waits for ranks that have not come as far."""
        if self.peaks_asked is not None:
            self.peaks_asked.wait()
        return Maxima(*self.peaks.tolist())


class StepMeter:
    """Measures steps, from the end of the one before."""

    def __init__(
        self, engine: Engine, dist: DistContext, progress: Progress, cost: Cost | None = None
    ) -> None:
        self.dist, self._engine, self._cost = dist, engine, cost
        self.restart(progress)

    def restart(self, progress: Progress) -> None:
        """Leave out of the next step's time all that was before this call."""
        self._since = Moment(self._engine.device)
        self._tokens, self._samples = progress.tokens, progress.samples

    def start_reduction(
        self, loss: Tensor, stats: BatchStats, metrics: Sequence[Tensor] = ()
    ) -> HostCopy:
        """Ask for the sums over all ranks of this rank's part of a step's mean loss (a scalar on
        the device, in nats), its batch statistics, and its parts of metrics (collective). Called
        before the update, so that the host waits for the gradients only."""
        # Ranks that run one model together have the statistics of the same samples.
        alike = self.dist.world_size // self._engine.data_axis.count
        # [loss, BatchStats..., metrics...]; `record` reads it back.
        known = [0.0, *(value / alike for value in stats), *[0.0] * len(metrics)]
        host = torch.tensor(known, dtype=torch.float64, pin_memory=loss.is_cuda)
        parts = host.to(loss.device, non_blocking=True)
        parts[0] = loss.detach()
        for place, value in enumerate(metrics, len(known) - len(metrics)):
            parts[place] = value.detach()
        return HostCopy(self._engine.total(parts))

    def launched_step(
        self, result: StepResult, before: Progress, progress: Progress,
        profile: Profile | None = None, *, stop: bool = False,
    ) -> PendingStep:  # fmt: skip
        """Return the step that has brought `before` to `progress`, and ask for the ranks' maxima;
        `stop`: this one was asked to (collective). The host waits for nothing."""
        device = self._engine.device
        on_gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        # Of the hosts: the device is not asked.
        peaks, asked = torch.tensor(Maxima(on_gpu, peak_beyond() or 0, int(stop))), None
        if self.dist.world_size > 1:
            maximum = torch.distributed.ReduceOp.MAX
            asked = torch.distributed.all_reduce(peaks, maximum, async_op=True)
        pending = PendingStep(
            before=before, progress=replace(progress, metrics=dict(progress.metrics)),
            result=result, profile=profile, time=time.time(), began=self._since,
            ended=Moment(device),
            trained=(progress.tokens - self._tokens, progress.samples - self._samples),
            peaks=peaks, peaks_asked=asked,
        )  # fmt: skip
        self._since, self._tokens, self._samples = pending.ended, progress.tokens, progress.samples
        return pending

    def record(self, pending: PendingStep) -> dict[str, float]:
        """The record of a step. The host waits until the device has taken it."""
        result, profile, progress = pending.result, pending.profile, pending.progress
        seconds = pending.ended.since(pending.began) if profile is None else profile.seconds
        ranks, shares = self.dist.world_size, self._engine.data_axis.count
        loss, *sums = result.sums.read()
        named = len(sums) - len(result.metrics)
        total = BatchStats(*sums[:named])
        gpu, host, _ = pending.maxima()
        record = step_record(
            progress, total, seconds=seconds, trained=pending.trained, ranks=ranks, shares=shares,
            loss=loss, grad_norm=float(result.report.grad_norm), rates=result.rates,
            when=pending.time, applied=result.report.applied, loss_scale=result.report.loss_scale,
        )  # fmt: skip
        record |= {name: size for name, size in zip(PEAKS, (gpu, host), strict=True) if size}
        if self._cost is not None:
            spent = seconds * ranks
            record["mfu"] = self._cost.utilisation(total.tokens, total.squares, spent)
        if profile is not None:
            parts = profile.shares._asdict().items()
            record |= {"profiled": True, **{f"{name}_share": share for name, share in parts}}
        if both := [name for name in result.metrics if name in record or name in OTHERS]:
            raise StageError(
                f"the objective has a metric {both[0]!r}, a name that each step's record has",
                hint="give it another name, such as reward/margin",
            )
        return record | dict(zip(result.metrics, sums[named:], strict=True))
