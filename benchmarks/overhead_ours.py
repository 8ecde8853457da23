"""The product's side: real stages, and `train.causal_lm`'s own step, feed and reporter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from overhead_data import map_tokens
from overhead_job import CLIP, LR, SEED, STRATEGIES, Job

from pipeline.contracts.data import Data
from pipeline.contracts.engine import Engine
from pipeline.contracts.model import ModelSource
from pipeline.contracts.stage import Context
from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from pipeline.plan.registry import Registry
from pipeline.run import rundir
from pipeline.run.metrics import Metrics
from stages.data.samples import TokenBlocks
from stages.model.hf import HfModel
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from stages.train.anomalies import AnomalyMonitor
from stages.train.causal_lm import TrainCausalLm
from stages.train.feed import Feed
from stages.train.loss import SummedLoss
from stages.train.report import Reporter
from stages.train.step import train_step


def run_context(job: Job, dist: DistContext, log: Any, on_exit: Any) -> Context:
    """What `pipe run` would give the stages: metrics from rank 0, a log file per rank."""
    folder = run_folder(job)
    metrics = Metrics(folder / rundir.METRICS if dist.is_main else None)
    return Context(run_dir=folder, seed=SEED, dist=dist, log=log, metrics=metrics, on_exit=on_exit)


def run_folder(job: Job) -> Path:
    """Our run's folder."""
    return job.folder / "run"


def source(job: Job, ctx: Context) -> ModelSource:
    """The random model, equal for both loops."""
    return HfModel(config=job.model, init="random").run(ctx)


class OurLoop:
    """The body of `stages.train.loop.train`, a block at a time."""

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
        self._feed = Feed(config, data, ctx.seed, self.engine.shard, self.engine.device)
        self._progress = Progress()
        self._loss = SummedLoss(self.engine.model)
        self._watch = AnomalyMonitor(config.anomalies, self.engine.shard.count)
        self._reporter = Reporter(
            ctx,
            self.engine,
            log_every=config.log_every,
            total_steps=self._feed.total_steps,
            progress=self._progress,
        )

    def run(self, steps: int) -> float:
        """Train so many steps; the global loss of the last."""
        for _ in range(steps):
            done, anomaly = train_step(
                self.engine, self._loss, self._feed, self._plan, self._progress, self._watch
            )
            assert not anomaly, anomaly
            self._reporter.add(done)
        return self._progress.metrics["loss"]
