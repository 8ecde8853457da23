"""The training loop. It names no strategy: the engine hides all differences between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import NoReturn

from pipeline import (
    Callbacks,
    Checkpoints,
    Context,
    Data,
    Measure,
    Phase,
    Progress,
    ends_period,
)
from pipeline.utils import activity
from stages.train.anomalies import Recovery
from stages.train.evaluation import evaluate, reason_to_stop, record_evaluation
from stages.train.garbage import collect_behind, collected_as_usual, collected_at_steps
from stages.train.generate import Writer
from stages.train.launched import LaunchedSteps
from stages.train.meter import StepMeter
from stages.train.profiling import Profiler
from stages.train.report import Reporter
from stages.train.resuming import Length
from stages.train.saves import Saves
from stages.train.settings import CausalLmFields
from stages.train.step import StepResult, TrainStep
from stages.train.verify_loss import verify_packing


@dataclass(kw_only=True)
class Training:
    """The loop from the step of `progress` on; it changes `progress` in place."""

    config: CausalLmFields
    eval_every: Fraction | None
    """Steps between evaluations; None: at the end only."""
    ctx: Context
    data: Data
    checkpoints: Checkpoints
    saves: Saves
    progress: Progress
    measure: Measure
    """The held-out loss of each row."""
    step: TrainStep
    recovery: Recovery
    profiler: Profiler
    meter: StepMeter
    launched: LaunchedSteps
    writer: Writer | None
    """Writes texts, if the recipe asks for them."""
    reporter: Reporter
    callbacks: Callbacks
    evaluated: bool = field(init=False)
    """Whether the current weights have been evaluated."""

    def run(self) -> str:
        """Train, and save (collective). Returns the last checkpoint's address. Raises Interrupted
        when a rank was asked to stop, once all steps that were taken are saved."""
        with self.ctx.dist.stop.deferred(), collected_at_steps():
            self._begin()
            while self._goes_on():
                self._advance()
            if self.data.heldout and self.config.eval_last and not self.evaluated:
                self._evaluate()  # the last batch of all was skipped
            if self._texts_due():
                self._write_texts()
            self._save()
            return self.saves.finish()

    def _advance(self) -> None:
        """Take a step, and do what is due after it."""
        progress, launched = self.progress, self.launched
        number = progress.step + 1
        self.ctx.dist.heartbeat.beat(Phase.STEP, step=number)
        profiled = self.profiler.due(number)
        if profiled:
            launched.tell()  # so that the device does nothing else
        before = replace(progress)
        with launched.told_on_failure():
            result, profile = self.profiler.run(number, lambda: self.step(progress))
        if result.anomaly:
            self._recover(result)
            return
        self.evaluated = False
        stop = self.ctx.dist.stop.asked
        launched.add(self.meter.end(result, before, progress, profile, stop=stop))
        collect_behind(number)
        with launched.told_on_failure():
            self.saves.poll()
            at_once = profiled or self.recovery.guards or self._pause_due()
        launched.tell(but=0 if at_once else 1)
        if launched.stop:
            self._stop()
        if self._evaluation_due():
            self._evaluate()
        if self._texts_due():
            self._write_texts()
        if self.checkpoints.due(progress):
            self._save()

    def _pause_due(self) -> bool:
        """Whether something comes between this step and the next."""
        last = self.progress.step >= self.step.feed.total_steps(self.progress)
        evaluates = self._evaluation_due() or self._texts_due()
        return last or evaluates or self.checkpoints.due(self.progress)

    def _begin(self) -> None:
        progress, config, feed = self.progress, self.config, self.step.feed
        self.evaluated = "eval_loss" in progress.metrics
        samples = feed.samples(progress.samples)
        verify_packing(self.step.engine, self.data, samples)
        self.callbacks.restore(progress.callbacks)
        self.callbacks.state()  # one that cannot be saved is found before anything is trained
        self.meter.restart(progress)
        total = feed.total_steps(progress)
        if progress.step >= total:
            shortfall = Length.of(config, self.data, progress).shortfall(self.ctx.slot)
            self.reporter.nothing_left(progress.step, total, shortfall)
        else:
            for warning in self.step.plan.schedule_warnings(total):
                self.ctx.log.warning("%s", warning)
            self._make_up()
        if config.anomalies.rolls_back:
            self._save()  # so that there is a checkpoint to go back to

    def _make_up(self) -> None:
        """Evaluate the model as it came, if that is asked for, and do what a stop came before."""
        progress = self.progress
        asked = bool(self.data.heldout) and self.config.eval_first
        first = asked and not progress.step and not progress.best
        own = "loss" in progress.metrics  # not the weights of a run from which this one starts
        evaluates = first or (own and self._evaluation_due() and not self.evaluated)
        settings = self.config.generate
        at_first = settings is not None and settings.first and not progress.step
        writes = (own and self._texts_due()) or (at_first and progress.texts_step is None)
        if evaluates:
            self._evaluate()
        if writes:
            self._write_texts()
        if (evaluates or writes) and self.checkpoints.due(progress):
            self._save()

    def _goes_on(self) -> bool:
        """Whether there is another step; reports the reason for an early end (collective)."""
        progress, total = self.progress, self.step.feed.total_steps(self.progress)
        known, progress.stopped = progress.stopped, ""
        if progress.step < total:
            reason = reason_to_stop(
                progress, self.config.early_stopping
            ) or self.callbacks.agree_to_end(self.ctx.dist)
            progress.stopped = reason and (known or reason)  # the end of before, after a resume
        if progress.stopped:
            self.launched.tell()
            self.reporter.ended_early(progress.step, total, progress.stopped, again=bool(known))
        return progress.step < total and not progress.stopped

    def _evaluation_due(self) -> bool:
        step = self.progress.step
        if not self.data.heldout:
            return False
        if ends_period(step, self.eval_every):
            return True
        return self.config.eval_last and step == self.step.feed.total_steps(self.progress)

    def _texts_due(self) -> bool:
        settings, step = self.config.generate, self.progress.step
        if settings is None or self.progress.texts_step == step:
            return False
        last = bool(self.progress.stopped) or step == self.step.feed.total_steps(self.progress)
        return last or (settings.every is not None and step % settings.every == 0)

    def _write_texts(self) -> None:
        assert self.writer is not None
        dist, step = self.ctx.dist, self.progress.step
        dist.heartbeat.beat(Phase.EVALUATE)
        with self._paused(), activity("generating texts"):
            texts = self.writer.write(self.step.engine, dist, step)
            if texts is None:
                self._stop()  # a resumed run writes them first
            self.progress.texts_step = step
            self.reporter.generated(step, texts)

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Report all steps so far, and leave the body's time out of the speed of training."""
        self.launched.tell()
        self.reporter.show()
        with collected_as_usual():
            yield
        self.meter.restart(self.progress)

    def _evaluate(self) -> None:
        engine, progress, dist = self.step.engine, self.progress, self.ctx.dist
        dist.heartbeat.beat(Phase.EVALUATE)
        with self._paused():
            size = self.config.microbatch_size(engine.data_axis.count)
            known = self.step.feed.vocabulary
            loss = evaluate(engine, self.measure, self.data, size, dist, known)
            if loss is None:
                self._stop()  # a resumed run evaluates these weights first
            self.evaluated = True
            record = record_evaluation(progress, loss, self.config.early_stopping)
            self.callbacks.on_evaluation(progress.step, progress, record)

    def _save(self) -> None:
        progress = self.progress
        self.launched.tell()
        progress.callbacks = self.callbacks.state()
        self.ctx.dist.heartbeat.beat(Phase.SAVE)
        with self._paused():
            self.saves.save(progress)

    def _stop(self) -> NoReturn:
        """Save, and end this process, as a rank was asked to (collective)."""
        self._save()
        self.saves.finish()
        self.ctx.log.info("stopped at step %d, which is saved", self.progress.step)
        self.ctx.dist.stop.end()

    def _recover(self, result: StepResult) -> None:
        """Skip an anomalous batch, or go back to a checkpoint and skip it from there."""
        self.reporter.show()
        progress = self.progress
        step, samples = progress.step, self.step.feed.count(progress.samples)
        norm = float(result.report.grad_norm)
        facts = self.recovery.recover(result.anomaly, norm, progress, samples)
        if progress.step < step:
            self.evaluated = "eval_loss" in progress.metrics
            self.callbacks.restore(progress.callbacks)
            self.reporter.rewind(progress.step)
        self.reporter.anomaly(progress.step + 1, facts)
        self.meter.restart(progress)
