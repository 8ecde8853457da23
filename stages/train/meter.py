"""Numbers of each step: asked of the device in the step, read when they are known."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed
from torch import Tensor

from pipeline import DistContext, Engine, Progress, StageError
from pipeline.hardware import peak_beyond
from pipeline.utils import HostCopy
from stages.batches.feed import BatchStats
from stages.train.flops import Cost
from stages.train.profiling import Profile
from stages.train.step import StepResult

PEAKS = ("peak_memory_bytes", "peak_host_memory_bytes")
OTHERS = ("step", "eval_loss", "perplexity")
"""Further names in `metrics.jsonl`."""


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


class Greatest:
    """The greatest of every rank's numbers, on the way (collective)."""

    def __init__(self, values: Sequence[int], ranks: int) -> None:
        self._values = torch.tensor(values)  # of the hosts: the device is not asked
        self._work = None
        if ranks > 1:
            maximum = torch.distributed.ReduceOp.MAX
            self._work = torch.distributed.all_reduce(self._values, maximum, async_op=True)

    def read(self) -> list[int]:
        """Return them; waits for ranks that have not come as far."""
        if self._work is not None:
            self._work.wait()
        found: list[int] = self._values.tolist()
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class TakenStep:
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
    sums: HostCopy
    metrics: Sequence[str]
    """Names of the objective's metrics, the last of the sums."""
    greatest: Greatest

    @property
    def seconds(self) -> float:
        """Duration; a profiled step's own."""
        return self.ended.since(self.began) if self.profile is None else self.profile.seconds

    def peaks(self) -> tuple[dict[str, int], bool]:
        """Peak bytes that are known, of the rank with most, and whether any rank has to stop."""
        *sizes, stops = self.greatest.read()
        return {name: size for name, size in zip(PEAKS, sizes, strict=True) if size}, stops > 0


class StepMeter:
    """Measures steps, from the end of the one before."""

    def __init__(
        self, engine: Engine, dist: DistContext, progress: Progress, cost: Cost | None = None
    ) -> None:
        self._engine = engine
        self._ranks = dist.world_size
        self._cost = cost
        self._sums: HostCopy | None = None
        self._metrics: Sequence[str] = ()
        self.restart(progress)

    def restart(self, progress: Progress) -> None:
        """Leave out of the next step's time all that was before this call."""
        self._since = Moment(self._engine.device)
        self._tokens, self._samples = progress.tokens, progress.samples

    def observe(self, loss: Tensor, stats: BatchStats, metrics: Mapping[str, Tensor]) -> None:
        """Take this rank's part of a step's mean loss (a scalar on the device, in nats), its batch
        statistics, and its parts of metrics by name, before its update: ask for their sums over all
        ranks (collective)."""
        # Ranks that run one model together have the statistics of the same samples.
        alike = self._ranks // self._engine.data_axis.count
        own = [0.0, *(value / alike for value in dataclasses.astuple(stats)), *[0.0] * len(metrics)]
        host = torch.tensor(own, dtype=torch.float64, pin_memory=loss.is_cuda)
        sums = host.to(loss.device, non_blocking=True)
        sums[0] = loss.detach()
        for place, value in enumerate(metrics.values(), len(own) - len(metrics)):
            sums[place] = value.detach()
        self._metrics = (*metrics,)
        self._sums = HostCopy(self._engine.total(sums))

    def end(
        self,
        result: StepResult,
        before: Progress,
        progress: Progress,
        profile: Profile | None = None,
        *,
        stop: bool = False,
    ) -> TakenStep:
        """Take the step that was observed last, which has brought `before` to `progress`: ask for
        the greatest of the ranks' peaks of memory, and whether any of them was asked to `stop`
        (collective). The host waits for nothing."""
        device = self._engine.device
        # of torch's tensors on its GPU, and of host memory for the model and its training
        on_gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        greatest = Greatest([on_gpu, peak_beyond() or 0, int(stop)], self._ranks)
        assert self._sums is not None, "the step was not observed"
        taken = TakenStep(
            before=before,
            progress=replace(progress, metrics=dict(progress.metrics)),
            result=result,
            profile=profile,
            time=time.time(),
            began=self._since,
            ended=Moment(device),
            trained=(progress.tokens - self._tokens, progress.samples - self._samples),
            sums=self._sums,
            metrics=self._metrics,
            greatest=greatest,
        )
        self._since, self._sums = taken.ended, None
        self._tokens, self._samples = progress.tokens, progress.samples
        return taken

    def record(self, taken: TakenStep) -> dict[str, float]:
        """The record of a step. The host waits until the device has taken it."""
        result, profile, progress = taken.result, taken.profile, taken.progress
        seconds, (targets, samples) = taken.seconds, taken.trained
        ranks, shares = self._ranks, self._engine.data_axis.count
        loss, *sums = taken.sums.read()
        named = len(sums) - len(taken.metrics)
        total = BatchStats(*sums[:named])
        peaks, _ = taken.peaks()
        record = {
            "grad_norm": float(result.report.grad_norm),
            **result.rates,
            "tokens": progress.tokens,
            "samples": progress.samples,
            "applied": result.report.applied,
            "loss_scale": result.report.loss_scale,
            "time": taken.time,
            "step_seconds": seconds,
            "target_tokens_per_second": targets / seconds,
            "samples_per_second": samples / seconds,
            "loss": loss,
            "tokens_per_second": total.tokens / seconds,
            "tokens_per_second_per_rank": total.tokens / seconds / ranks,
            "data_wait_share": total.seconds / seconds / shares,
            **peaks,
        }
        if self._cost is not None:
            spent = seconds * ranks
            record["mfu"] = self._cost.utilisation(total.tokens, total.squares, spent)
        if profile is not None:
            parts = profile.shares._asdict().items()
            record |= {"profiled": True, **{f"{name}_share": share for name, share in parts}}
        if both := [name for name in taken.metrics if name in record or name in OTHERS]:
            raise StageError(
                f"the objective has a metric {both[0]!r}, a name that each step's record has",
                hint="give it another name, such as reward/margin",
            )
        return record | dict(zip(taken.metrics, sums[named:], strict=True))
