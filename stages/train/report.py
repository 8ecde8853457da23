"""What a person and a program see of the training: lines on screen, records in `metrics.jsonl`."""

from __future__ import annotations

import time
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
        self.loss: float | None = None
        """Global mean loss of the last reported step."""
        self._ctx = ctx
        self._engine = engine
        self._every = log_every
        self._total = total_steps
        self._progress = progress
        self._pending: list[tuple[Tensor, dict[str, Any]]] = []
        self._since = time.perf_counter()
        self._tokens = progress.tokens
        ctx.metrics.rewind(progress.step)

    def add(self, loss: Tensor, report: StepReport) -> None:
        """Take note of a finished step (collective when a report is due)."""
        record = {
            "step": self._progress.step,
            "grad_norm": report.grad_norm,
            "tokens": self._progress.tokens,
            "samples": self._progress.samples,
            "applied": report.applied,
            "loss_scale": report.loss_scale,
            "time": time.time(),
        }
        self._pending.append((loss, record))
        if self._progress.step % self._every == 0:
            self.flush()

    def evaluated(self, loss: float) -> None:
        """Report a held-out loss."""
        self.flush()
        self._ctx.metrics.write({"step": self._progress.step, "eval_loss": loss})
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
            self._ctx.metrics.write({**record, "loss": loss})
            self.loss = loss
        self._line(self._pending[-1][1], speed, (now - self._since) / len(self._pending))
        self._pending.clear()
        self._since, self._tokens = now, self._progress.tokens

    def _line(self, record: dict[str, Any], speed: float, seconds: float) -> None:
        left = (self._total - self._progress.step) * seconds
        self._ctx.log.info(
            "step %d/%d  loss %.4f  grad_norm %.3f  %.0f tokens/s  %.2f s/step  eta %d:%02d",
            self._progress.step, self._total, self.loss, record["grad_norm"], speed, seconds,
            *divmod(round(left), 60),
        )  # fmt: skip
