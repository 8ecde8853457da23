"""Numbers of each step, and their report: lines on screen, records in `metrics.jsonl`."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from pipeline import IN_DISPLAY, Context, DistContext, Engine, Progress, StepCallback
from pipeline.hardware import peak_beyond
from pipeline.utils import HostCopy, duration
from stages.train.batches import BatchStats
from stages.train.flops import Cost
from stages.train.profiling import Profile
from stages.train.step import StepResult


class StepMeter:
    """Measures steps, from the end of the one before."""

    def __init__(
        self, engine: Engine, dist: DistContext, progress: Progress, cost: Cost | None = None
    ) -> None:
        self._engine = engine
        self._ranks = dist.world_size
        self._cost = cost
        self._sums: HostCopy | None = None
        self.stop = False
        """Whether any rank was asked to stop before the step that was measured last."""
        self.restart(progress)

    def restart(self, progress: Progress) -> None:
        """Leave out of the next step's time all that was before this call."""
        self._since = time.perf_counter()
        self._tokens, self._samples = progress.tokens, progress.samples

    def observe(self, loss: Tensor, stats: BatchStats) -> None:
        """Take this rank's part of a step's mean loss (a scalar on the device, in nats) and its
        batch statistics, before its update: ask for their sums over all ranks (collective)."""
        # Ranks that run one model together have the statistics of the same samples.
        alike = self._ranks // self._engine.data_axis.count
        own = [0.0, *(value / alike for value in dataclasses.astuple(stats))]
        host = torch.tensor(own, dtype=torch.float64, pin_memory=loss.is_cuda)
        sums = host.to(loss.device, non_blocking=True)
        sums[0] = loss.detach()
        self._sums = HostCopy(self._engine.total(sums))

    def measure(
        self,
        result: StepResult,
        progress: Progress,
        profile: Profile | None = None,
        *,
        stop: bool = False,
    ) -> dict[str, float]:
        """The record of the step that was observed last and that `progress` has (collective). A
        profiled step took the time of its `profile`; `stop` says whether this rank was asked to
        stop. The host waits for nothing: since it knows the gradient norm, the sums that the device
        was asked for before are there too."""
        now = time.perf_counter()
        seconds = now - self._since if profile is None else profile.seconds
        ranks, shares = self._ranks, self._engine.data_axis.count
        assert self._sums is not None, "the step was not observed"
        loss, *sums = self._sums.read()
        total = BatchStats(*sums)
        peaks = self._greatest(stop)
        record = {
            "grad_norm": result.report.grad_norm,
            "lr": result.lr,
            "tokens": progress.tokens,
            "samples": progress.samples,
            "applied": result.report.applied,
            "loss_scale": result.report.loss_scale,
            "time": time.time(),
            "step_seconds": seconds,
            "target_tokens_per_second": (progress.tokens - self._tokens) / seconds,
            "samples_per_second": (progress.samples - self._samples) / seconds,
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
        self._since, self._tokens, self._samples = now, progress.tokens, progress.samples
        return record

    def _greatest(self, stop: bool) -> dict[str, int]:
        """Peak bytes of the rank with most since the start, if known: of torch's tensors on its
        GPU, and of host memory for the model and its training (`pipeline.hardware.host`). Notes
        whether any rank has to `stop` (collective)."""
        device = self._engine.device
        on_gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        most = torch.tensor([on_gpu, peak_beyond() or 0, int(stop)])  # the device is not asked
        if self._ranks > 1:
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        *sizes, stops = most.tolist()
        self.stop = stops > 0
        names = ("peak_memory_bytes", "peak_host_memory_bytes")
        return {name: size for name, size in zip(names, sizes, strict=True) if size}


class Reporter(StepCallback):
    """Writes a record of every step, and shows a line every `log_every` steps."""

    def __init__(
        self, ctx: Context, *, log_every: int, total_steps: Callable[[Progress], int]
    ) -> None:
        self._ctx = ctx
        self._log_every = log_every
        self._total_steps = total_steps
        self._unshown: list[Mapping[str, float]] = []
        self._last, self._total = 0, 0

    def on_step(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        self._last, self._total = step, self._total_steps(progress)
        self._write(step, progress, {**record, "total_steps": self._total})
        self._unshown.append(record)
        if step % self._log_every == 0:
            self.show()

    def on_evaluation(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        self._write(step, progress, {**record, "time": time.time()})
        mark = "  (the best so far)" if progress.best.get("step") == step else ""
        self._ctx.log.info(
            f"step {step}  eval_loss {record['eval_loss']:.4f}  "
            f"perplexity {record['perplexity']:.2f}{mark}",
            extra=IN_DISPLAY,
        )

    def anomaly(self, step: int, facts: Mapping[str, Any]) -> None:
        """Report a step without update. Its record has the next step's number and no `loss`."""
        self._ctx.metrics.write({"step": step, "time": time.time(), **_json(facts)})
        shown = "  ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
        self._ctx.log.warning(shown)

    def generated(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Report texts that were generated."""
        self._ctx.metrics.write({"step": step, "time": time.time(), "generated": list(samples)})
        for sample in samples:
            text = f"{sample['prompt']} -> {sample['text']}"
            self._ctx.log.info("step %d  %s", step, text.replace("\n", " "))

    def saved(self, step: int, *, stalled: float) -> None:
        """Report a checkpoint, for which training stood still for `stalled` seconds."""
        record = {"step": step, "time": time.time(), "checkpoint_stall_seconds": stalled}
        self._ctx.metrics.write(record)

    def written(self, step: int, *, seconds: float) -> None:
        """Report that the last checkpoint is on disk, `seconds` after its save began."""
        self._ctx.metrics.write({"step": step, "time": time.time(), "checkpoint_seconds": seconds})

    def rewind(self, step: int) -> None:
        """Drop reports of steps after `step`."""
        self._unshown.clear()
        self._ctx.metrics.rewind(step)

    def show(self) -> None:
        """Show a line for the steps since the last line, if there are any."""
        if self._unshown:
            line = "  ".join(self._line(self._unshown))
            self._ctx.log.info(line, extra=IN_DISPLAY)
            self._unshown = []

    def _write(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        # The best is repeated in every record, so that readers only need the last line.
        best = {f"best_{name}": value for name, value in progress.best.items()}
        self._ctx.metrics.write({"step": step, **_json(record), **best})

    def _line(self, records: Sequence[Mapping[str, float]]) -> list[str]:
        """The last step's numbers, and mean speeds of all."""
        last = records[-1]
        parts = [f"step {self._last}/{self._total}", f"loss {last['loss']:.4f}"]
        parts.append(f"grad_norm {last['grad_norm']:.3f}")
        if math.isfinite(last["lr"]):
            parts.append(f"lr {last['lr']:.3g}")
        parts.append(f"{_mean(records, 'tokens_per_second'):.0f} tokens/s")
        if "mfu" in last:
            parts.append(f"mfu {_mean(records, 'mfu'):.1%}")
        seconds = sum(record["step_seconds"] for record in records) / len(records)
        left = duration((self._total - self._last) * seconds)
        return [*parts, f"{seconds:.2f} s/step", f"eta {left}"]


def _json(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with None for numbers that JSON lacks."""
    odd = {k for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
    return {name: None if name in odd else value for name, value in record.items()}


def _mean(records: Sequence[Mapping[str, float]], name: str) -> float:
    """Mean of a number over the time of all records."""
    seconds = sum(record["step_seconds"] for record in records)
    return float(sum(record[name] * record["step_seconds"] for record in records) / seconds)
