"""The start of a training: from a checkpoint if there is one, with all that takes part."""

from __future__ import annotations

import contextlib
import functools
import zlib

from pipeline import (
    Callbacks,
    Checkpoints,
    Context,
    Data,
    Engine,
    ModelSource,
    OptimizerPlan,
    Progress,
    StageError,
    StepCallback,
    TrainedRun,
)
from pipeline.checkpoint import start_random_streams
from stages.batches.feed import Feed
from stages.train.anomalies import AnomalyMonitor, Recovery
from stages.train.flops import known_cost, known_peak
from stages.train.generate import Writer
from stages.train.launched import LaunchedSteps
from stages.train.loop import Training
from stages.train.meter import StepMeter
from stages.train.profiling import Profiler, traces
from stages.train.report import Reporter
from stages.train.resuming import (
    Length,
    again,
    lineage,
    require_same_lineage,
    require_steps_left,
)
from stages.train.saves import Saves
from stages.train.settings import GIVE_SAMPLES, NO_SAMPLES, CausalLmFields
from stages.train.step import TrainStep
from stages.train.stragglers import StragglerWatch


def train(
    config: CausalLmFields,
    ctx: Context,
    engine: Engine,
    data: Data,
    plan: OptimizerPlan,
    checkpoints: Checkpoints,
    model: ModelSource,
    callback: StepCallback | None = None,
) -> TrainedRun:
    """Train to the last step, from the newest checkpoint if there is one (collective)."""
    if config.evaluates and not data.heldout:
        raise StageError(f"{config.evaluates[0]} {NO_SAMPLES}", hint=GIVE_SAMPLES)
    if not engine.state().groups:
        raise StageError("the model of this engine is not trained: its optimizer is optimizer.none")
    start_random_streams(zlib.crc32(f"{ctx.seed}/{engine.random_stream}".encode()))
    identity = lineage(config, ctx, data, model)
    length = config.length_on(data, checkpoints)
    checkpoints.begin(length)
    validate = functools.partial(require_same_lineage, identity, ctx.accept, again=again(ctx))
    restored = checkpoints.restore(validate)
    ctx.metrics.rewind(-1 if restored is None else restored.step)
    progress = restored or Progress()
    progress.lineage = identity
    feed = Feed(
        config, data, ctx.seed, engine.data_axis, engine.device,
        workers=config.workers, vocabulary=model.vocab_size,
    )  # fmt: skip
    given = Length.of(config, data, progress)
    require_steps_left(ctx, checkpoints, given, progress, feed.total_steps(progress))
    monitor = AnomalyMonitor(config.anomalies, engine.total)
    cost = known_cost(engine, model, known_peak(engine))
    meter = StepMeter(engine, ctx.dist, progress, cost)
    reporter = Reporter(ctx, log_every=config.log_every, total_steps=feed.total_steps)
    saves = Saves(checkpoints=checkpoints, reporter=reporter, newest=progress.step)
    callbacks = Callbacks(reporter, saves, callback)
    recovery = Recovery(config.anomalies, monitor, checkpoints, validate)
    training = Training(
        config=config,
        eval_every=length.in_steps(config.eval_every),
        ctx=ctx,
        data=data,
        checkpoints=checkpoints,
        saves=saves,
        progress=progress,
        measure=config.measure(model),
        step=TrainStep(
            engine=engine,
            objective=config.objective(model),
            feed=feed,
            plan=plan,
            monitor=monitor,
            observe=meter.observe,
            heartbeat=ctx.dist.heartbeat,
        ),
        recovery=recovery,
        profiler=Profiler(config.profile_steps, traces(ctx), engine, ctx.dist),
        meter=meter,
        launched=LaunchedSteps(
            progress=progress,
            meter=meter,
            recovery=recovery,
            reporter=reporter,
            callbacks=callbacks,
            stragglers=StragglerWatch(ctx),
        ),
        writer=None if config.generate is None else Writer(config.generate, model, ctx.seed),
        reporter=reporter,
        callbacks=callbacks,
    )
    with contextlib.closing(feed):  # its threads read the data, which is closed behind this slot
        last = training.run()
    if config.result == "best":
        return checkpoints.best()
    return TrainedRun(checkpoint=last, progress=progress)
