"""Programs of each rank in the tests of anomalous steps: a training with some poisoned batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.contracts.callbacks import StepCallback
from pipeline.contracts.data import Data, MicroBatch, Sample
from pipeline.contracts.metrics import records
from pipeline.contracts.model import ModelSource
from pipeline.contracts.objective import LossParts, Scores
from pipeline.distributed.process_group import DistContext
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.objectives.cross_entropy import CrossEntropy
from stages.optimizer.adamw import AdamW
from stages.train.causal_lm import TrainCausalLm
from stages.train.settings import Anomalies
from tests.support.runs import ListedSamples, ToySamples, context
from tests.support.state import Setting, digest, make_engine, source

BATCH = 4
NAN, HIGH = 99, 100
"""Tokens of poisoned samples, which multiply the loss by FACTORS."""
FACTORS = {NAN: math.nan, HIGH: 30.0}


@dataclass(frozen=True, kw_only=True)
class Poisoned:
    """One training, as plain data that travels to the ranks."""

    setting: Setting
    batches: Sequence[int]
    """Numbers of the batches to train on; a batch is the same in every training."""
    poison: dict[int, int] = field(default_factory=dict)
    """Token of the last sample, by batch."""
    steps: int | None = None
    """Number of steps. None: an epoch, evaluated at its end."""
    anomalies: Anomalies
    every: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of the train slot."""


class Batches(ListedSamples):
    """The chosen batches in order."""

    def __init__(self, case: Poisoned) -> None:
        pool = ToySamples(BATCH * 12, 99, 5)
        chosen = []
        for number in case.batches:
            samples = [pool[BATCH * number + place] for place in range(BATCH)]
            if number in case.poison:
                last = samples[-1]
                tokens = np.full_like(last.input_ids, case.poison[number])
                samples[-1] = Sample(input_ids=tokens, labels=last.labels)
            chosen += samples
        super().__init__(chosen)


class PoisonedLoss(CrossEntropy):
    """The training loss, changed by the poison."""

    def __call__(self, scores: Scores, batch: MicroBatch) -> LossParts:
        parts = super().__call__(scores, batch)
        for token, factor in FACTORS.items():
            if bool((batch.input_ids == token).any()):
                parts = LossParts(terms={"targets": parts.terms["targets"] * factor})
        return parts


class PoisonedTraining(TrainCausalLm):
    """Training by the poisoned loss."""

    def objective(self, model: ModelSource) -> PoisonedLoss:
        return PoisonedLoss()


def train(
    dist: DistContext, folder: str, case: Poisoned, callback: StepCallback | None = None
) -> dict[str, Any]:
    """Train; return digests of the final state, the records, and the progress."""
    ctx = context(dist, folder)
    plan = AdamW(lr=1e-2, warmup_steps=2, weight_decay=0.1, max_grad_norm=0.5).run(ctx)
    engine = make_engine(ctx, case.setting, plan)
    checkpoints = ShardedCheckpoint(every=case.every, keep=None).run(ctx, engine)
    loop = PoisonedTraining(
        global_batch_size=BATCH, micro_batch_size=1, shuffle=False, log_every=1,
        steps=case.steps, epochs=None if case.steps else 1.0, anomalies=case.anomalies,
        **case.fields,
    )  # fmt: skip
    heldout = None if case.steps else ToySamples(3, 99, 6)
    data = Data(train=Batches(case), heldout=heldout, pad_id=0, identity={})
    model = source(ctx, case.setting)
    trained = loop.run(ctx, engine, data, plan, checkpoints, model, callback)
    state = digest(engine, dist)
    checkpoints.close()
    engine.close()
    lines = list(records(ctx.run_dir / "metrics.jsonl"))
    return {"state": state, "lines": lines, **trained.record()}


def train_both(
    dist: DistContext, folder: str, left: Poisoned, right: Poisoned
) -> list[dict[str, Any]]:
    """Train one case after the other, in one process group."""
    return [train(dist, f"{folder}/left", left), train(dist, f"{folder}/right", right)]
