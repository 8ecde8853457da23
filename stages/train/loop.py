"""The training loop. It names no strategy: the engine hides all differences between them."""

from __future__ import annotations

import contextlib
import functools
import gc
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NoReturn

from pipeline import (
    Callbacks,
    Checkpoints,
    Context,
    Data,
    Engine,
    ModelSource,
    OptimizerPlan,
    Phase,
    Progress,
    StageError,
    StepCallback,
    TrainedRun,
    TrainingLength,
    ends_period,
)
from pipeline.checkpoint import start_random_streams
from pipeline.utils import activity
from stages.batches.feed import Feed
from stages.train.anomalies import AnomalyMonitor
from stages.train.checks import (
    Done,
    has_trained,
    hint_to_retrain,
    lineage,
    require_same_lineage,
    verify_packing,
)
from stages.train.evaluation import (
    TextGenerator,
    evaluate,
    reason_to_stop,
    record_evaluation,
    set_metric,
)
from stages.train.report import Reporter, Saves
from stages.train.settings import GIVE_SAMPLES, NO_SAMPLES, CausalLmFields
from stages.train.speed import Profiler, StragglerWatch, known_cost, known_peak
from stages.train.step import PendingStep, StepMeter, StepResult, TrainStep

COLLECTED = 50
"""Steps between two collections of reference cycles."""


class Training:
    """A training from the step of `progress` on, which it changes in place."""

    def __init__(
        self, config: CausalLmFields, ctx: Context, engine: Engine, data: Data, plan: OptimizerPlan,
        checkpoints: Checkpoints, model: ModelSource, callback: StepCallback | None = None,
    ) -> None:  # fmt: skip
        """Restore the newest checkpoint, if there is one; build what takes part (collective)."""
        if config.fields_needing_heldout and not data.heldout:
            raise StageError(f"{config.fields_needing_heldout[0]} {NO_SAMPLES}", hint=GIVE_SAMPLES)
        if not engine.state().groups:
            raise StageError(
                "the model of this engine is not trained: its optimizer is optimizer.none"
            )
        self.config, self.ctx, self.data, self.checkpoints = config, ctx, data, checkpoints
        self.measure, self.dist, self.engine = config.measure(model), ctx.dist, engine
        length = config.length_on(data, checkpoints)
        self.eval_every = length.in_steps(config.eval_every)
        self.progress, restore = self._restore(model, length)
        progress = self.progress
        self.feed = Feed(
            config, data, ctx.seed, engine.data_axis, engine.device,
            workers=config.workers, vocabulary=model.vocab_size,
        )  # fmt: skip
        self.done = Done.of(config, data, progress)
        self.done.require_steps_left(ctx, checkpoints, progress, self.feed.total_steps(progress))
        self.monitor = AnomalyMonitor(config.anomalies, engine.total, restore)
        peak = known_peak(engine)
        cost = None if peak is None else known_cost(engine, model, peak)
        self.meter = StepMeter(engine, ctx.dist, progress, cost)
        self.train_step = TrainStep(
            engine=engine, objective=config.objective(model), feed=self.feed, plan=plan,
            monitor=self.monitor, meter=self.meter,
        )  # fmt: skip
        folder = ctx.run_dir / (f"profile-{ctx.training}" if ctx.training else "profile")
        self.profiler = Profiler(folder, engine, ctx.dist)
        texts = config.generate
        self.generator = None if texts is None else TextGenerator(texts, model, ctx.seed)
        self.reporter = Reporter(ctx, log_every=config.log_every, total_steps=self.feed.total_steps)
        self.saves = Saves(checkpoints=checkpoints, reporter=self.reporter, newest=progress.step)
        self.callbacks = Callbacks(self.reporter, self.saves, callback)
        self.stragglers = StragglerWatch(ctx)
        self.pending = deque[PendingStep]()
        """Steps that were launched and not yet reported. While nothing needs the numbers of a step,
        they are read after the launch of the next, on which the device works meanwhile: the same
        step on every rank, so all decide alike."""
        self.asked_to_stop = False
        """Whether any rank was asked to stop, by the steps that were reported."""
        self.evaluated = "eval_loss" in progress.metrics
        """Whether the current weights have been evaluated."""

    def _restore(
        self, model: ModelSource, length: TrainingLength
    ) -> tuple[Progress, Callable[[], Progress | None]]:
        """Restore the newest checkpoint, if there is one (collective). Returns the progress, and a
        function that restores again, for rollbacks. Random streams start from the seed before, as
        restoring replaces them. Records of steps after the checkpoint are dropped; without one all
        are, step 0's too: hence -1."""
        ctx, checkpoints = self.ctx, self.checkpoints
        start_random_streams(zlib.crc32(f"{ctx.seed}/{self.engine.random_stream}".encode()))
        identity = lineage(self.config, ctx, self.data, model)
        checkpoints.begin(length)
        hint = hint_to_retrain(ctx)
        validate = functools.partial(require_same_lineage, identity, ctx.accept, hint=hint)
        restore = functools.partial(checkpoints.restore, validate)
        restored = restore()
        ctx.metrics.rewind(-1 if restored is None else restored.step)
        progress = restored or Progress()
        progress.lineage = identity
        return progress, restore

    def run(self) -> TrainedRun:
        """Train to the last step, and save (collective). Raises Interrupted when a rank was asked
        to stop, once all steps that were taken are saved."""
        # The feed's threads read the data, which is closed after this slot.
        with contextlib.closing(self.feed), self.dist.stop.deferred(), collected(as_usual=False):
            self._begin()
            while self._goes_on():
                self._advance()
            if self.data.heldout and self.config.eval_last and not self.evaluated:
                self._evaluate()  # the last batch of all was skipped
            if self._texts_due():
                self._write_texts()
            self._save()
            last = self.saves.finish()
        if self.config.result == "best":
            return self.checkpoints.best()
        return TrainedRun(checkpoint=last, progress=self.progress)

    def _advance(self) -> None:
        """Run one step, then any evaluation, generation or save that is due."""
        progress = self.progress
        number = progress.step + 1
        self.dist.heartbeat.beat(Phase.STEP, step=number)
        profiled, profile = number in self.config.profile_steps, None
        if profiled:
            self._report()  # so that the device does nothing else
        before = replace(progress)
        with self._reported_on_failure():
            if profiled:
                result, profile = self.profiler.run(number, lambda: self.train_step(progress))
            else:
                result = self.train_step(progress)
        if result.anomaly:
            self._recover(result)
            return
        self.evaluated = False
        stop = self.dist.stop.asked
        step = self.meter.launched_step(result, before, progress, profile, stop=stop)
        self.pending.append(step)
        collect_after(number)
        with self._reported_on_failure():
            self.saves.poll()
            at_once = profiled or self.monitor.guard is not None or self._is_last()
            at_once = at_once or self._evaluation_due() or self._texts_due()
            at_once = at_once or self.checkpoints.due(progress)
        self._report(but=0 if at_once else 1)
        if self.asked_to_stop:
            self._stop()
        if self._evaluation_due():
            self._evaluate()
        if self._texts_due():
            self._write_texts()
        if self.checkpoints.due(progress):
            self._save()

    def _begin(self) -> None:
        """Check that training can start; evaluate and generate what is asked for before the first
        step, and what an interrupted run missed."""
        progress, config, settings = self.progress, self.config, self.config.generate
        if self.data.packed:
            verify_packing(self.engine, self.data, self.feed.samples(progress.samples))
        self.callbacks.restore(progress.callbacks)
        self.callbacks.state()  # one that cannot be saved is found before anything is trained
        self.meter.restart(progress)
        total = self.feed.total_steps(progress)
        if progress.step >= total:
            shortfall = self.done.shortfall(self.ctx.slot)
            self.reporter.nothing_left(progress.step, total, shortfall)
        else:
            for warning in self.train_step.plan.schedule_warnings(total):
                self.ctx.log.warning("%s", warning)
            asked = bool(self.data.heldout) and config.eval_first
            first = asked and not progress.step and not progress.best
            trained = has_trained(progress)
            evaluates = first or (trained and self._evaluation_due() and not self.evaluated)
            at_first = settings is not None and settings.first and not progress.step
            writes = (trained and self._texts_due()) or (at_first and progress.texts_step is None)
            if evaluates:
                self._evaluate()
            if writes:
                self._write_texts()
            if (evaluates or writes) and self.checkpoints.due(progress):
                self._save()
        if config.anomalies.rolls_back:
            self._save()  # so that there is a checkpoint to go back to

    def _goes_on(self) -> bool:
        """Whether there is another step; reports the reason for an early end (collective)."""
        progress, total, reason = self.progress, self.feed.total_steps(self.progress), ""
        if progress.step < total:
            if (stopping := self.config.early_stopping) is not None:
                reason = reason_to_stop(progress, stopping)
            reason = reason or self.callbacks.agree_to_end(self.dist)
        ended = self.reporter.ends_early(progress, total, reason, self._report)
        return progress.step < total and not ended

    def _is_last(self) -> bool:
        return self.progress.step == self.feed.total_steps(self.progress)

    def _evaluation_due(self) -> bool:
        if not self.data.heldout:
            return False
        if ends_period(self.progress.step, self.eval_every):
            return True
        return self.config.eval_last and self._is_last()

    def _texts_due(self) -> bool:
        settings, step = self.config.generate, self.progress.step
        if settings is None or self.progress.texts_step == step:
            return False
        last = bool(self.progress.stopped) or self._is_last()
        return last or (settings.every is not None and step % settings.every == 0)

    def _write_texts(self) -> None:
        assert self.generator is not None
        step = self.progress.step
        with self._paused(Phase.EVALUATE), activity("generating texts"):
            texts = self.generator.generate(self.engine, self.dist, step)
            if texts is None:
                self._stop()  # a resumed run writes them first
            self.progress.texts_step = step
            self.reporter.generated(step, texts)

    def _report(self, *, but: int = 0) -> None:
        """Wait for the numbers of all steps but the newest `but`, and report them, each once and in
        order (collective). Raises StageError for a step whose gradient is not finite."""
        while len(self.pending) > but:
            step, record = self._next()
            self.callbacks.on_step(step.progress.step, step.progress, record)
            seconds, data = record["step_seconds"], step.result.stats.seconds
            if self.stragglers.look(step.progress.step, seconds=seconds, data=data):
                self.meter.restart(self.progress)

    @contextlib.contextmanager
    def _reported_on_failure(self) -> Iterator[None]:
        """Write the records of steps before it if the body raises, as other ranks may not come to
        what is collective. Raises StageError for one whose gradient was not finite, in its place:
        that explains the failure."""
        try:
            yield
        except Exception:
            with contextlib.suppress(RuntimeError):  # a peer or the device is lost
                while self.pending:
                    step, record = self._next()
                    self.reporter.on_step(step.progress.step, step.progress, record)
            raise

    def _next(self) -> tuple[PendingStep, dict[str, float]]:
        """The oldest pending step, and its record, whose loss becomes the progress's."""
        step = self.pending.popleft()
        self.monitor.require_finite(step.result.report, step.before, step.progress)
        record = self.meter.record(step)
        for progress in (self.progress, step.progress):
            set_metric(progress, "loss", record["loss"])
        self.asked_to_stop |= step.maxima().stop > 0
        return step, record

    @contextlib.contextmanager
    def _paused(self, phase: Phase) -> Iterator[None]:
        """Report all pending steps, and exclude the body from the speed of training."""
        self.dist.heartbeat.beat(phase)
        self._report()
        self.reporter.show()
        with collected(as_usual=True):
            yield
        self.meter.restart(self.progress)

    def _evaluate(self) -> None:
        engine, progress = self.engine, self.progress
        with self._paused(Phase.EVALUATE):
            size = self.config.microbatch_size(engine.data_axis.count)
            known = self.feed.vocabulary
            loss = evaluate(engine, self.measure, self.data, size, self.dist, known)
            if loss is None:
                self._stop()  # a resumed run evaluates these weights first
            self.evaluated = True
            record = record_evaluation(progress, loss, self.config.early_stopping)
            self.callbacks.on_evaluation(progress.step, progress, record)

    def _save(self) -> None:
        self._report()
        self.progress.callbacks = self.callbacks.state()
        with self._paused(Phase.SAVE):
            self.saves.save(self.progress)

    def _stop(self) -> NoReturn:
        """Save, and end this process, as a rank was asked to (collective)."""
        self._save()
        self.saves.finish()
        self.ctx.log.info("stopped at step %d, which is saved", self.progress.step)
        self.dist.stop.end()

    def _recover(self, result: StepResult) -> None:
        """Skip an anomalous batch, or go back to a checkpoint and skip it from there."""
        # With a guard every step is reported at once: nothing is pending here.
        self.reporter.show()
        progress = self.progress
        step, samples = progress.step, self.feed.samples_in_step(progress.samples)
        norm = float(result.report.grad_norm)
        facts = self.monitor.recover(result.anomaly, norm, progress, samples)
        if progress.step < step:
            self.evaluated = "eval_loss" in progress.metrics
            self.callbacks.restore(progress.callbacks)
            self.reporter.rewind(progress.step)
        self.reporter.anomaly(progress.step + 1, facts)
        self.meter.restart(progress)


# Left to itself, Python collects reference cycles after some number of allocations: each rank in
# another step, in which the others wait for it, and time and again all objects of all libraries.


@contextlib.contextmanager
def collected(*, as_usual: bool) -> Iterator[None]:
    """Collect cycles in the body only by `collect_after`, older ones once at its beginning; or
    `as_usual`, in a pause between steps, and at its end what died since the pause before."""
    was_on = gc.isenabled()
    if not as_usual:
        gc.collect()
    (gc.enable if as_usual else gc.disable)()
    try:
        yield
    finally:
        if as_usual:
            gc.collect()
        (gc.enable if was_on else gc.disable)()


def collect_after(step: int) -> None:
    """Collect young garbage, if it is time after the step of this number."""
    if step % COLLECTED == 0:
        gc.collect(1)
