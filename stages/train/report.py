"""What a person and a program see of the training: lines on screen, records in `metrics.jsonl`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from pipeline.artifacts import Progress
from pipeline.engine import Engine, StepReport
from pipeline.stage import Context


class Reporter:
    """Collects steps without reading the device, and reports them `log_every` at a time."""

    def __init__(
        self, ctx: Context, engine: Engine, log_every: int, total_steps: int, progress: Progress
    ) -> None:
        self._ctx = ctx
        self._engine = engine
        self._every = log_every
        self._total = total_steps
        self._progress = progress
        self._pending: list[tuple[Tensor, dict[str, Any]]] = []
        self._since = time.perf_counter()
        self._tokens = progress.tokens
        self._grad_norm = float("nan")
        ctx.metrics.rewind(progress.step)

    def add(self, loss: Tensor, report: StepReport) -> None:
        """Take note of a finished step (collective when a report is due)."""
        record = {
            "step": self._progress.step,
            "grad_norm": _finite(report.grad_norm),
            "tokens": self._progress.tokens,
            "samples": self._progress.samples,
            "applied": report.applied,
            "loss_scale": report.loss_scale,
            "time": time.time(),
        }
        self._grad_norm = report.grad_norm
        self._pending.append((loss, record))
        if self._progress.step % self._every == 0:
            self.flush()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Report what is pending, then keep the body's time (evaluation, saving) out of the
        speed of training (collective)."""
        self.flush()
        yield
        self._since = time.perf_counter()

    def evaluated(self, loss: float) -> None:
        """Report a held-out loss."""
        self._keep("eval_loss", loss)
        self._ctx.metrics.write({"step": self._progress.step, "eval_loss": _finite(loss)})
        self._ctx.log.info("step %d  eval_loss %.4f", self._progress.step, loss)

    def flush(self) -> None:
        """Sum the pending steps' losses over ranks and report them (collective)."""
        if not self._pending:
            return
        losses = torch.stack([loss for loss, _ in self._pending])
        if self._engine.shard.count > 1:
            torch.distributed.all_reduce(losses)
        now = time.perf_counter()
        tokens = self._progress.tokens - self._tokens
        speed = tokens / (now - self._since)
        for loss, (_, record) in zip(losses.tolist(), self._pending, strict=True):
            self._ctx.metrics.write({**record, "loss": _finite(loss)})
            self._keep("loss", loss)
        self._line(loss, speed, (now - self._since) / len(self._pending))
        self._pending.clear()
        self._since, self._tokens = now, self._progress.tokens

    def _keep(self, name: str, value: float) -> None:
        """Let the progress have the newest value, which is none if it is not finite."""
        self._progress.metrics.pop(name, None)
        if math.isfinite(value):
            self._progress.metrics[name] = value

    def _line(self, loss: float, speed: float, seconds: float) -> None:
        minutes, left = divmod(round((self._total - self._progress.step) * seconds), 60)
        self._ctx.log.info(
            f"step {self._progress.step}/{self._total}  loss {loss:.4f}"
            f"  grad_norm {self._grad_norm:.3f}  {speed:.0f} tokens/s  {seconds:.2f} s/step"
            f"  eta {minutes}:{left:02d}"
        )


def _finite(value: float) -> float | None:
    """JSON has no word for infinity."""
    return value if math.isfinite(value) else None
