"""The loop. It names no strategy: everything that differs between them is behind the engine."""

from __future__ import annotations

import functools
import time
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.checkpoint import rng_state
from pipeline.contracts.data import Data, Samples
from pipeline.contracts.engine import Engine
from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.contracts.stage import Context
from pipeline.contracts.training import Checkpoints, Progress, TrainedRun
from pipeline.errors import StageError
from stages.train.anomalies import AnomalyMonitor
from stages.train.causal_lm import TrainCausalLm
from stages.train.evaluation import evaluate, note, reason_to_stop
from stages.train.feed import Feed
from stages.train.flops import utilisation
from stages.train.lineage import require_same_lineage
from stages.train.loss import SummedLoss
from stages.train.policies import GIVE_SAMPLES, NO_SAMPLES
from stages.train.profiling import Profile, Profiler
from stages.train.recovery import Recovery
from stages.train.report import Reporter
from stages.train.self_checks import prove_head, prove_packing
from stages.train.step import StepResult, train_step


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
    rng_state.start(zlib.crc32(f"{ctx.seed}/{engine.shard.index}".encode()))
    validate = functools.partial(require_same_lineage, began, ctx.accept)
    restored = checkpoints.restore(validate)
    ctx.metrics.rewind(-1 if restored is None else restored.step)
    progress = restored or Progress()
    progress.lineage = dict(began)
    feed = Feed(config, data, ctx.seed, engine.shard, engine.device)
    ctx.on_exit(feed.close)
    recovery = Recovery(config.anomalies, checkpoints, validate)
    last = Training(config, ctx, engine, data, plan, checkpoints, feed, progress).run(recovery)
    if config.result == "best":
        return checkpoints.best()
    return TrainedRun(checkpoint=last, progress=progress)


class Saving(NamedTuple):
    """The newest checkpoint of this process."""

    step: int
    began: float
    stalled: float
    """Seconds that training stood still for it."""


class Training:
    """One training from some step on; `progress` moves on in place."""

    def __init__(
        self,
        config: TrainCausalLm,
        ctx: Context,
        engine: Engine,
        data: Data,
        plan: OptimizerPlan,
        checkpoints: Checkpoints,
        feed: Feed,
        progress: Progress,
    ) -> None:
        _require_heldout(config, data)
        self._config = config
        self._ctx = ctx
        self._engine = engine
        self._data = data
        self._plan = plan
        self._checkpoints = checkpoints
        self._feed = feed
        self._progress = progress
        self._loss = SummedLoss(engine.model, config.loss_chunk_size)
        self._watch = AnomalyMonitor(config.anomalies, engine.shard.count)
        self._evaluated = "eval_loss" in progress.metrics
        self._profiler = Profiler(config.profile_steps, ctx.run_dir, engine)
        self._start = progress.step
        self._saving: Saving | None = None
        self._reporter = Reporter(
            ctx,
            engine,
            log_every=config.log_every,
            total_steps=feed.total_steps,
            progress=progress,
            utilisation=utilisation(engine),
        )

    def run(self, recovery: Recovery) -> str:
        """Train to the last step, or to where early stopping ends it, and save (collective). Gives
        the last checkpoint's address."""
        self._prove()
        self._begin()
        while self._goes_on():
            (done, anomaly), profile = self._step()
            if anomaly:
                self._recover(recovery, anomaly, done)
                continue
            self._reporter.add(done, profile)
            self._evaluated = False
            if self._data.heldout and self._is_to_be_evaluated():
                self._evaluate(self._data.heldout)
            if self._checkpoints.due(self._progress):
                self._save()
        if self._data.heldout and self._config.eval_last and not self._evaluated:
            self._evaluate(self._data.heldout)  # the last batch of all was left out
        self._save()
        return self._finish()

    def _step(self) -> tuple[tuple[StepResult, str], Profile | None]:
        take = functools.partial(
            train_step,
            self._engine, self._loss, self._feed, self._plan, self._progress, self._watch,
        )  # fmt: skip
        number = self._progress.step + 1
        if not self._profiler.wants(number):
            return take(), None
        return self._profiler.record(number, take)

    def _prove(self) -> None:
        """What the recipe's savings take for granted, on what is trained on next."""
        engine, data, position = self._engine, self._data, self._progress.samples
        prove_packing(engine, data, self._feed.samples(position), self._loss)
        if self._config.loss_chunk_size is not None:
            prove_head(engine, data, self._feed.samples(position), self._loss)

    def _begin(self) -> None:
        progress, heldout = self._progress, self._data.heldout
        total = self._feed.total_steps(progress)
        for doubt in self._plan.schedule_warnings(total) if progress.step < total else ():
            self._ctx.log.warning("%s", doubt)
        if progress.step >= total:
            self._ctx.log.info("nothing left to train: step %d of %d", progress.step, total)
        elif heldout and self._config.eval_first and not progress.step and not progress.best:
            self._evaluate(heldout)
            if self._checkpoints.due(progress):
                self._save()
        if self._config.anomalies.rolls_back:
            self._save()  # so that there is always one to go back to

    def _goes_on(self) -> bool:
        """Whether there is another step; tells why not, if that is early."""
        progress = self._progress
        total = self._feed.total_steps(progress)
        progress.stopped = ""
        if progress.step < total:
            progress.stopped = reason_to_stop(progress, self._config.early_stopping)
        if progress.stopped:
            self._reporter.show()
            self._ctx.log.info(
                "stopping early, at step %d of %d: %s", progress.step, total, progress.stopped
            )
        return progress.step < total and not progress.stopped

    def _is_to_be_evaluated(self) -> bool:
        step, every = self._progress.step, self._config.eval_every
        last = step == self._feed.total_steps(self._progress)
        return (last and self._config.eval_last) or (every is not None and step % every == 0)

    def _evaluate(self, heldout: Samples) -> None:
        with self._reporter.paused():
            size = self._config.microbatch_size(self._engine.shard.count)
            loss = evaluate(self._engine, self._loss, self._data, heldout, size)
            self._evaluated = True
            note(self._progress, loss, self._config.early_stopping)
            self._reporter.evaluated(loss)

    def _save(self) -> None:
        step = self._progress.step
        with self._reporter.paused():
            began = time.perf_counter()
            self._checkpoints.save(self._progress)
            stalled = time.perf_counter() - began
        # A second save of a step adds to what is there.
        if step != (self._start if self._saving is None else self._saving.step):
            self._saving = Saving(step, began, stalled)

    def _finish(self) -> str:
        """Wait for the last checkpoint to be on disk; its address."""
        last = self._checkpoints.finish()
        if self._saving is not None:
            seconds = time.perf_counter() - self._saving.began
            self._reporter.saved(stalled=self._saving.stalled, seconds=seconds)
        return last

    def _recover(self, recovery: Recovery, anomaly: str, done: StepResult) -> None:
        """Get behind a step that no update is to come of."""
        self._reporter.show()
        progress = self._progress
        step, count = progress.step, self._feed.count(progress.samples)
        facts = recovery.recover(anomaly, done, self._watch, progress, count)
        if progress.step < step:
            self._evaluated = "eval_loss" in progress.metrics
            self._reporter.rewound()
        self._reporter.anomalous(facts)


def _require_heldout(config: TrainCausalLm, data: Data) -> None:
    if config.evaluates and not data.heldout:
        raise StageError(f"{config.evaluates[0]} {NO_SAMPLES}", hint=GIVE_SAMPLES)
