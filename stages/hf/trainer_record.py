"""The record of a training by the Trainer: progress, measurements, complete checkpoints."""

from __future__ import annotations

import json
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from transformers import Trainer, TrainerCallback

from pipeline import (
    Callbacks,
    Context,
    Data,
    DataAxis,
    OptimizerPlan,
    Phase,
    Progress,
    StageError,
)
from pipeline.checkpoint import address
from pipeline.utils import sync, sync_tree
from stages.batches.feed import BatchStats, Feed, microbatches
from stages.batches.layout import collate
from stages.batches.samples import read
from stages.formats.stored import PROGRESS
from stages.hf.trainer_fields import TrainerFields
from stages.model.rotary_compat import placed
from stages.objectives.cross_entropy import RowLoss
from stages.objectives.judge import measured
from stages.objectives.scoring import ModelScorer
from stages.train.evaluation import heldout_targets, record_evaluation
from stages.train.report import Reporter
from stages.train.step import advance


def root(ctx: Context) -> Path:
    """Return the folder of the Trainer's checkpoints."""
    return Path(address(ctx.run_dir, None, ctx.training))


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints that were saved completely, so have a progress; oldest first."""
    found = [path.parent for path in folder.glob(f"checkpoint-*/{PROGRESS}")]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


@dataclass(eq=False)
class Recorder(TrainerCallback):  # type: ignore[misc]
    """Keeps the progress, evaluates, calls the step callbacks, and completes checkpoints."""

    config: TrainerFields
    ctx: Context
    data: Data
    feed: Feed
    plan: OptimizerPlan
    progress: Progress
    trainer: Trainer
    reporter: Reporter
    callbacks: Callbacks
    """The reporter among them."""
    taken: list[BatchStats]
    """Statistics of this rank's micro-batches since the last step."""
    stopped: bool = False
    """Whether training ends, saved, because a rank was asked to stop."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Begin to measure time."""
        self._restart()

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Give a sign of life."""
        self.ctx.dist.heartbeat.beat(Phase.STEP, step=self.progress.step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Advance the progress; stop if a rank was asked to."""
        advance(self.progress, self.feed)
        dist, stats = self.ctx.dist, sum(self.taken, BatchStats())
        self.taken.clear()
        sums = torch.tensor([stats.tokens, stats.seconds, dist.stop.asked], dtype=torch.float64)
        if dist.world_size > 1:
            torch.distributed.all_reduce(sums)
        self._tokens, self._waited, stops = sums.tolist()
        if stops:
            self.stopped = control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **rest: Any) -> None:
        """Record the step; evaluate if it is due. Raises StageError for a non-finite gradient."""
        if "loss" not in logs:
            return
        progress, norm, loss = self.progress, float(logs["grad_norm"]), float(logs["loss"])
        if not math.isfinite(norm):
            raise StageError(
                f"step {progress.step}: the gradient norm is {norm}",
                hint="lower the learning rate, or look for broken samples",
            )
        progress.metrics["loss"] = loss
        rates = self.plan.rates(self.plan.lr_scales(progress.step - 1, args.max_steps))
        record = {
            "grad_norm": norm, **rates, "tokens": progress.tokens,
            "samples": progress.samples, "applied": True, "loss_scale": 1.0, "time": time.time(),
            "loss": loss, **self._speed(),
        }  # fmt: skip
        self.callbacks.on_step(progress.step, progress, record)
        every = self.config.eval_every
        due = progress.step == args.max_steps or (every is not None and progress.step % every == 0)
        if due:
            self.evaluate()
        if self.ends_early(args.max_steps):
            control.should_save = control.should_training_stop = True
            if not due:
                self.evaluate()
        self._restart()

    def ends_early(self, steps: int) -> bool:
        """Whether a callback ends the training before its last step (collective)."""
        progress = self.progress
        known, progress.stopped = progress.stopped, ""
        if progress.step < steps:
            reason = self.callbacks.agree_to_end(self.ctx.dist)
            progress.stopped = reason and (known or reason)  # the end of before, after a resume
        if progress.stopped:
            self.reporter.ended_early(progress.step, steps, progress.stopped, again=bool(known))
        return bool(progress.stopped)

    def _restart(self) -> None:
        """Leave out of the next step's time all that was before this call."""
        self._since = time.perf_counter()
        self._before = self.progress.tokens, self.progress.samples

    def _speed(self) -> dict[str, float]:
        """Numbers of the step by its time, as every train stage has them."""
        seconds, ranks = time.perf_counter() - self._since, self.ctx.dist.world_size
        targets, samples = self._before
        return {
            "step_seconds": seconds,
            "target_tokens_per_second": (self.progress.tokens - targets) / seconds,
            "samples_per_second": (self.progress.samples - samples) / seconds,
            "tokens_per_second": self._tokens / seconds,
            "tokens_per_second_per_rank": self._tokens / seconds / ranks,
            "data_wait_share": self._waited / seconds / ranks,
        }

    def evaluate(self) -> None:
        """Evaluate the weights on the held-out samples, if there are any (collective)."""
        if self.data.heldout is None:
            return
        model, dist, progress = self.trainer.model_wrapped, self.ctx.dist, self.progress
        axis = DataAxis(index=dist.rank, count=dist.world_size)
        size = self.config.microbatch_size(axis.count)
        measure, scorer = RowLoss(), ModelScorer(model)
        summed = torch.zeros((), dtype=torch.float64, device=dist.device)
        model.eval()
        with torch.no_grad():
            for start, end in microbatches(len(self.data.heldout), axis, size):
                samples = read(self.data, self.data.heldout, range(start, end))
                batch = placed(model, collate(samples, self.data.pad_id, dist.device))
                summed += measured(measure, scorer, batch, batch).sum()
        model.train()
        if axis.count > 1:
            torch.distributed.all_reduce(summed)
        record = record_evaluation(progress, float(summed) / heldout_targets(self.data), None)
        self.callbacks.on_evaluation(progress.step, progress, record)

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Mark the checkpoint as complete, then remove those that need not be kept."""
        dist, place, keep = self.ctx.dist, root(self.ctx), self.config.keep
        self.progress.callbacks = self.callbacks.state()
        dist.barrier()  # every rank has written its random state
        if dist.is_main:
            newest = place / f"checkpoint-{state.global_step}"
            sync_tree(newest)
            (newest / PROGRESS).write_text(json.dumps(vars(self.progress), indent=1), "utf-8")
            sync(newest / PROGRESS)
            for old in [] if keep is None else complete_checkpoints(place)[:-keep]:
                (old / PROGRESS).unlink()
                shutil.rmtree(old)
        dist.barrier()
        self._restart()
