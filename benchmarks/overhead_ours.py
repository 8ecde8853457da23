"""The product's side: real stages, and `train.causal_lm`'s own step, feed and reporter."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from overhead_data import map_tokens
from overhead_job import CLIP, LR, SEED, STRATEGIES, Job

from pipeline.chain.registry import Registry
from pipeline.contracts.data import Data
from pipeline.contracts.engine import Engine
from pipeline.contracts.metrics import Metrics
from pipeline.contracts.model import ModelSource
from pipeline.contracts.stage import Context
from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from pipeline.execution import rundir
from stages.batches.feed import Feed
from stages.data.samples import TokenBlocks
from stages.model.hf import HfModel
from stages.objectives.cross_entropy import CrossEntropy
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from stages.train.anomalies import AnomalyMonitor
from stages.train.causal_lm import TrainCausalLm
from stages.train.loop import collect_after
from stages.train.report import Reporter
from stages.train.step import PendingStep, StepMeter, TrainStep


def run_context(job: Job, dist: DistContext, log: Any, on_exit: Any) -> Context:
    """Return the context that `pipe run` gives to stages: metrics from rank 0, a log file for each
    rank."""
    folder = run_folder(job)
    metrics = Metrics(folder / rundir.METRICS if dist.is_main else None)
    return Context(run_dir=folder, seed=SEED, dist=dist, log=log, metrics=metrics, on_exit=on_exit)


def run_folder(job: Job) -> Path:
    """Return our run's folder."""
    return job.folder / "run"


def source(job: Job, ctx: Context) -> ModelSource:
    """Return the random model that both loops train."""
    return HfModel(config=job.model, init="random").run(ctx)


class OurLoop:
    """The body of `stages.train.loop`, a block at a time."""

    def __init__(self, job: Job, ctx: Context, model: ModelSource) -> None:
        self._plan = AdamW(lr=LR, max_grad_norm=CLIP).run(ctx)
        precision = PrecisionPolicy(compute=job.compute).run(ctx)  # type: ignore[arg-type]
        strategy = STRATEGIES[job.strategy]
        wrap = Registry.installed().load(strategy.wrap)(**strategy.fields)
        self.engine: Engine = wrap.run(ctx, model, precision, self._plan)
        config = TrainCausalLm(
            global_batch_size=job.global_batch, micro_batch_size=job.micro_batch,
            steps=job.total_steps, log_every=job.steps,
        )  # fmt: skip
        blocks = TokenBlocks(map_tokens(job.folder), job.length)
        data = Data(train=blocks, heldout=None, pad_id=0, identity={})
        engine, self._progress = self.engine, Progress()
        feed = Feed(config, data, ctx.seed, engine.data_axis, engine.device, workers=config.workers)
        ctx.on_exit(feed.close)
        self._meter = StepMeter(engine, ctx.dist, self._progress)
        self._step = TrainStep(
            engine=engine,
            objective=CrossEntropy(),
            feed=feed,
            plan=self._plan,
            monitor=AnomalyMonitor(config.anomalies, engine.total),
            meter=self._meter,
        )
        self._reporter = Reporter(ctx, log_every=config.log_every, total_steps=feed.total_steps)

    def run(self, steps: int) -> float:
        """Train `steps` steps; return the global loss of the last one."""
        progress, loss = self._progress, 0.0
        pending: list[PendingStep] = []
        gc.disable()  # as stages.train.loop; what it does once before training is not timed
        for left in reversed(range(steps)):
            before = replace(progress)
            result = self._step(progress)
            pending.append(self._meter.launched_step(result, before, progress))
            collect_after(progress.step)
            while len(pending) > (left > 0):  # as Training
                loss = self._tell(pending.pop(0))
        gc.enable()
        return loss

    def _tell(self, step: PendingStep) -> float:
        record = self._meter.record(step)
        assert math.isfinite(record["grad_norm"])
        self._reporter.on_step(step.progress.step, step.progress, record)
        return record["loss"]
