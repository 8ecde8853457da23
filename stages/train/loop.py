"""The loop. It names no strategy: everything that differs between them is behind the engine."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from pipeline.artifacts import Checkpoints, Data, OptimizerPlan, Progress, TrainedRun
from pipeline.engine import Engine, StepReport
from pipeline.errors import StageError
from pipeline.stage import Context
from stages.train.causal_lm import TrainCausalLm
from stages.train.evaluation import evaluate
from stages.train.feed import Feed
from stages.train.loss import summed_loss
from stages.train.origin import require_same_origin
from stages.train.report import Reporter


def train(
    config: TrainCausalLm,
    ctx: Context,
    engine: Engine,
    data: Data,
    plan: OptimizerPlan,
    checkpoints: Checkpoints,
    began: Mapping[str, Any],
) -> TrainedRun:
    """Train to the last step from wherever the newest checkpoint left off (collective). `began` is
    what positions in this training mean something for."""
    torch.manual_seed(zlib.crc32(f"{ctx.seed}/{engine.shard.index}".encode()))
    admit = functools.partial(require_same_origin, began, ctx.accept)
    progress = checkpoints.restore(admit) or Progress()
    progress.origin = dict(began)
    feed = Feed(config, data, ctx.seed, engine.shard, engine.device, progress)
    ctx.on_exit(feed.close)
    if progress.step >= feed.total_steps:
        ctx.log.info("nothing left to train: step %d of %d", progress.step, feed.total_steps)
    reporter = Reporter(ctx, engine, config.log_every, feed.total_steps, progress)
    while progress.step < feed.total_steps:
        reporter.add(*train_step(engine, feed, plan, progress))
        last = progress.step == feed.total_steps
        if data.heldout and (last or _due(config.eval_every, progress.step)):
            with reporter.paused():
                size = config.microbatch_size(engine.shard.count)
                reporter.evaluated(evaluate(engine, data, data.heldout, size))
        if checkpoints.due(progress.step):
            with reporter.paused():
                checkpoints.save(progress)
    with reporter.paused():
        checkpoints.save(progress)
    return TrainedRun(checkpoint=checkpoints.finish(), progress=progress)


def train_step(
    engine: Engine, feed: Feed, plan: OptimizerPlan, progress: Progress
) -> tuple[torch.Tensor, StepReport]:
    """One optimizer step: accumulate, clip and apply, advance. Returns this rank's part of the mean
    loss, still on the device, and the engine's report. Raises StageError on a non-finite
    gradient."""
    targets = feed.targets(progress.samples)
    if targets == 0:
        raise StageError(f"step {progress.step + 1}: no target token in the whole batch")
    progress.metrics.pop("eval_loss", None)  # it was that of other weights
    loss_sum = torch.zeros((), device=engine.device)
    for batch, last in feed.microbatches(progress.samples):
        with engine.microbatch(last=last):
            loss = summed_loss(engine.model, batch)
            engine.backward(loss * (engine.shard.count / targets))
        loss_sum += loss.detach()
    report = engine.step(lr_scale=plan.lr_scale(progress.step, feed.total_steps))
    # An overflow under loss scaling is skipped and goes away; without a scale to lower, it stays.
    if not math.isfinite(report.grad_norm) and (report.applied or report.loss_scale <= 1.0):
        raise StageError(
            f"step {progress.step + 1}: the gradient norm is {report.grad_norm}",
            hint="lower the learning rate, or look for broken samples; "
            "the last checkpoint is from before this step",
        )
    progress.samples += feed.count(progress.samples)
    progress.step += 1
    progress.tokens += targets
    progress.skipped += not report.applied
    return loss_sum / targets, report


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
