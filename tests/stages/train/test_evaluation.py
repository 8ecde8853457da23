"""Evaluation on held-out samples, the best checkpoint, and early stopping."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import random
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.contracts.data import Data, MicroBatch
from pipeline.contracts.engine import DataAxis
from pipeline.contracts.metrics import records
from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from pipeline.distributed.signals import Interrupted
from pipeline.errors import StageError
from pipeline.testing import plan_view, problems
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.data.stages import StreamData
from stages.objectives.cross_entropy import RowLoss
from stages.optimizer.adamw import AdamW
from stages.train.causal_lm import TrainCausalLm
from stages.train.evaluation import BLOCK, reason_to_stop, record_evaluation, rows_in_order
from stages.train.loop import Training
from stages.train.settings import EarlyStopping
from tests.support.processes import run_ranks
from tests.support.runs import ToySamples, context, toy_data
from tests.support.state import Setting, make_engine, source


def evaluated(losses: list[float], stopping: EarlyStopping) -> list[str]:
    """Return early stopping's decision after each loss."""
    progress, said = Progress(), []
    for loss in losses:
        progress.step += 1
        record_evaluation(progress, loss, stopping)
        said.append(reason_to_stop(progress, stopping))
    return said


@pytest.mark.parametrize(
    ("stopping", "losses", "stops_after"),
    [
        (EarlyStopping(patience=2), [3.0, 2.0, 2.0, 2.5], 4),
        (EarlyStopping(patience=2), [3.0, 3.5, 2.9, 3.5, 2.8, 2.8, 2.9], 7),
        (EarlyStopping(patience=1), [3.0, math.nan], 2),
        (EarlyStopping(patience=2), [math.nan, math.inf], 2),
        # neither 2.9 nor 2.85 improves on 3.0 by 0.25, nor do both together
        (EarlyStopping(patience=2, min_improvement=0.25), [3.0, 2.9, 2.85], 3),
        (EarlyStopping(patience=2, min_improvement=0.25), [3.0, 2.9, 2.75, 2.6, 2.5, 2.4], None),
    ],
)
def test_patience(stopping: EarlyStopping, losses: list[float], stops_after: int | None) -> None:
    said = evaluated(losses, stopping)
    stopped = [number for number, text in enumerate(said, 1) if text]
    assert stopped == ([] if stops_after is None else [stops_after])


def test_the_reason_is_told() -> None:
    assert evaluated([3.0, 2.0, 2.5], EarlyStopping(patience=1))[-1] == (
        "eval_loss has not improved on 2.0000 in 1 evaluation"
    )
    assert evaluated([math.nan, math.nan], EarlyStopping(patience=2))[-1] == (
        "eval_loss was never a number in 2 evaluations"
    )


def test_the_best_is_the_first_of_the_lowest_however_small_the_improvement() -> None:
    progress = Progress()
    for loss in (3.0, 2.9, 2.9, math.nan, 3.5):
        progress.step += 1
        record_evaluation(progress, loss, EarlyStopping(patience=9, min_improvement=1.0))
    assert progress.best == {"step": 2, "eval_loss": 2.9}
    assert progress.patience == {"eval_loss": 3.0, "evaluations": 4}
    assert progress.metrics == {"eval_loss": 3.5, "perplexity": math.exp(3.5)}


def test_perplexity_beyond_a_float_is_infinite() -> None:
    assert record_evaluation(Progress(), 1000.0, None)["perplexity"] == math.inf


def train(
    dist: DistContext, folder: str, fields: dict[str, Any], start_from: str | None = None
) -> dict[str, Any]:
    """Train 12 steps that soon overshoot, evaluating every 3, from the newest checkpoint."""
    ctx = context(dist, folder)
    setting = Setting(wrap="ddp")
    plan = AdamW(lr=0.05, schedule="constant", warmup_steps=0).run(ctx)
    engine = make_engine(ctx, setting, plan)
    checkpoints = ShardedCheckpoint(every=6, keep_best=1, start_from=start_from).run(ctx, engine)
    loop = TrainCausalLm(global_batch_size=4, steps=12, **{"eval_every": 3, **fields})
    trained = loop.run(ctx, engine, toy_data(), plan, checkpoints, source(ctx, setting))
    checkpoints.close()
    engine.close()
    lines = list(records(ctx.run_dir / "metrics.jsonl"))
    return {"lines": lines, **trained.record()}


def train_by_epochs(dist: DistContext, folder: str, steps: int) -> list[str]:
    """Train on 26 samples, 6.5 steps an epoch; return the names of the checkpoints."""
    ctx = context(dist, folder)
    plan = AdamW(lr=0.05, schedule="constant", warmup_steps=0).run(ctx)
    engine = make_engine(ctx, Setting(wrap="ddp"), plan)
    checkpoints = ShardedCheckpoint(every="0.5 epochs", keep=None).run(ctx, engine)
    loop = TrainCausalLm(global_batch_size=4, steps=steps, eval_every="1/3 epochs")
    given = source(ctx, Setting(wrap="ddp"))
    loop.run(ctx, engine, toy_data(26), plan, checkpoints, given)
    checkpoints.close()
    engine.close()
    return sorted(path.name for path in (ctx.run_dir / "checkpoints").iterdir())


def test_evaluations_and_checkpoints_by_parts_of_an_epoch_fall_the_same_after_a_resume(
    tmp_path: Path,
) -> None:
    whole, halves = str(tmp_path / "whole"), str(tmp_path / "halves")
    saved = run_ranks(train_by_epochs, 1, whole, 14)[0]
    # ceil(k x 6.5 / 2), and the last
    assert saved == [f"step-{step:08}" for step in (4, 7, 10, 13, 14)]
    run_ranks(train_by_epochs, 1, halves, 8)
    assert run_ranks(train_by_epochs, 2, halves, 14)[0] == [
        f"step-{step:08}" for step in (4, 7, 8, 10, 13, 14)
    ]
    found = []
    for folder in (whole, halves):
        lines = records(Path(folder) / "metrics.jsonl")
        found.append({line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line})
    assert sorted(found[0]) == [3, 5, 7, 9, 11, 13, 14]  # ceil(k x 6.5 / 3), and the last
    assert sorted(found[1]) == [3, 5, 7, 8, 9, 11, 13, 14]
    assert all(found[1][step] == pytest.approx(loss, abs=1e-6) for step, loss in found[0].items())


def test_parts_of_an_epoch_need_data_that_has_one() -> None:
    stream = StreamData(shards="s3://bucket/*.jsonl", sequence_length=8)
    view = plan_view({"data": stream, "checkpoint": ShardedCheckpoint()})
    batch = {"global_batch_size": 8, "steps": 10}
    told = problems(TrainCausalLm, {**batch, "eval_every": "0.25 epochs"}, plan=view)
    why = "and the data slot does not know how many samples an epoch has"
    assert [f"{one.key}: {one.message}" for one in told] == [
        "eval_every: needs held-out samples, and there are none",
        f"eval_every: is 0.25 epochs, {why}",
    ]
    view = plan_view({"data": stream, "train": TrainCausalLm(global_batch_size=8, steps=10)})
    told = problems(ShardedCheckpoint, {"every": "1 epoch"}, plan=view)
    assert [f"{one.key}: {one.message}" for one in told] == [f"every: is 1 epoch, {why}"]
    told = problems(ShardedCheckpoint, {"every": "1 epoch", "keep_every": 500})
    assert [one.key for one in told] == ["keep_every"]


@pytest.mark.parametrize(("taken", "periods"), [
    (True, ["0.25 epochs", "1 epoch", "1/3 epochs", "10 epochs", ".5 epochs"]),
    (False, ["0 epochs", "0.0 epochs", "-1 epochs", "1/0 epochs", "epoch", "1 epoch ", "25",
             "1e9 epochs", 0]),
])  # fmt: skip
def test_periods_that_fields_take(taken: bool, periods: list[object]) -> None:
    for every in periods:
        found = [one.key for one in problems(ShardedCheckpoint, {"every": every})]
        assert found == ([] if taken else ["every"]), every


def heldout(told: dict[str, Any]) -> dict[int, float]:
    return {line["step"]: line["eval_loss"] for line in told["lines"] if "eval_loss" in line}


def test_a_run_ends_early_resumes_as_ended_and_goes_on_when_asked(tmp_path: Path) -> None:
    through = run_ranks(train, 1, str(tmp_path / "through"), {})[0]
    assert sorted(heldout(through)) == [3, 6, 9, 12]
    evaluations = [line for line in through["lines"] if "eval_loss" in line]
    for line in evaluations:
        assert line["perplexity"] == pytest.approx(math.exp(line["eval_loss"]), rel=1e-12)
    assert through["progress"]["metrics"]["perplexity"] == evaluations[-1]["perplexity"]
    assert min(heldout(through), key=heldout(through).__getitem__) == 3
    early = {"early_stopping": EarlyStopping(patience=2)}
    run = str(tmp_path / "run")
    ended = run_ranks(train, 1, run, early)[0]
    assert sorted(heldout(ended)) == [3, 6, 9]
    assert ended["progress"]["step"] == 9
    assert ended["progress"]["stopped"] == (
        f"eval_loss has not improved on {heldout(through)[3]:.4f} in 2 evaluations"
    )
    assert ended["checkpoint"].endswith("step-00000009")
    again = run_ranks(train, 1, run, {**early, "result": "best"})[0]
    assert again["lines"] == ended["lines"]
    assert again["checkpoint"].endswith("step-00000003")
    assert again["progress"]["step"] == 3
    assert again["progress"]["metrics"]["eval_loss"] == heldout(through)[3]
    on = run_ranks(train, 1, run, {"early_stopping": EarlyStopping(patience=9)})[0]
    assert on["progress"]["step"] == 12
    assert on["progress"]["stopped"] == ""
    assert heldout(on)[12] == heldout(through)[12]


def test_a_run_that_starts_from_another_has_a_best_and_a_patience_of_its_own(
    tmp_path: Path,
) -> None:
    fields = {"early_stopping": EarlyStopping(patience=2), "result": "best"}
    ended = run_ranks(train, 1, str(tmp_path / "ended"), fields)[0]
    last = str(tmp_path / "ended" / "checkpoints" / "step-00000009")
    on = run_ranks(train, 1, str(tmp_path / "on"), fields, last)[0]
    assert list(heldout(on)) == [12]  # worse than step 3 of the other run
    assert heldout(on)[12] > heldout(ended)[3]
    assert on["checkpoint"] == str(tmp_path / "on" / "checkpoints" / "step-00000012")
    assert on["progress"]["best"] == {"step": 12, "eval_loss": heldout(on)[12]}
    assert on["progress"]["patience"] == {"eval_loss": heldout(on)[12], "evaluations": 0}
    assert on["progress"]["samples"] == 48
    assert on["progress"]["stopped"] == ""


def test_what_a_run_takes_over_from_another_is_how_far_it_has_come() -> None:
    other = Progress(
        step=5, samples=24, tokens=90, skipped=1, recent_losses=[2.0], lineage={"seed": 7},
        metrics={"eval_loss": 2.0}, best={"step": 5, "eval_loss": 2.0}, stopped="why",
        patience={"eval_loss": 2.0, "evaluations": 3}, left_out=[[4, 8]], left_out_in_a_row=1,
        rollbacks=2,
    )  # fmt: skip
    assert other.as_new_run() == Progress(
        step=5, samples=24, tokens=90, skipped=1, recent_losses=[2.0], lineage={"seed": 7}
    )


def one_step(dist: DistContext, folder: str, warmup: int) -> tuple[list[str], list[float]]:
    """Return the warnings of a training of one step and of the same training when it is done, and
    the next numbers of Python's and numpy's generators."""
    told = []
    setting = Setting(wrap="ddp")
    for _ in range(2):
        random.seed()
        np.random.seed()
        ctx = context(dist, folder)
        ctx.log.setLevel(logging.WARNING)
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
        ctx.log.addHandler(handler)
        plan = AdamW(warmup_steps=warmup).run(ctx)
        engine = make_engine(ctx, setting, plan)
        checkpoints = ShardedCheckpoint().run(ctx, engine)
        loop = TrainCausalLm(global_batch_size=4, steps=1)
        loop.run(ctx, engine, toy_data(), plan, checkpoints, source(ctx, setting))
        checkpoints.close()
        engine.close()
        ctx.log.removeHandler(handler)
    return told, [random.random(), np.random.random()]


def test_a_training_without_any_rate_warns_and_every_generator_follows_the_seed(
    tmp_path: Path,
) -> None:
    (warnings, draws) = run_ranks(one_step, 1, str(tmp_path / "warm-up"), 1)[0]
    assert [one.startswith("warm-up begins with a learning rate of 0") for one in warnings] == [
        True
    ]
    assert run_ranks(one_step, 1, str(tmp_path / "none"), 0)[0] == [[], draws]


def test_the_model_as_it_came_can_be_the_best(tmp_path: Path) -> None:
    fields = {"eval_first": True, "result": "best"}
    told = run_ranks(train, 1, str(tmp_path), fields)[0]
    assert sorted(heldout(told)) == [0, 3, 6, 9, 12]
    assert min(heldout(told), key=heldout(told).__getitem__) == 0
    assert told["checkpoint"].endswith("step-00000000")
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000000", "step-00000006", "step-00000012"]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"eval_every": 2}, "eval_every"),
        ({"eval_first": True}, "eval_first"),
        ({"result": "best"}, "result"),
    ],
)
def test_evaluation_needs_held_out_samples(fields: Any, name: str) -> None:
    data = Data(train=toy_data().train, heldout=None, pad_id=0, identity={})
    config = TrainCausalLm(global_batch_size=4, steps=3, **fields)
    nothing: Any = None
    with pytest.raises(StageError, match=f"^{name} needs held-out samples, and there are none"):
        Training(config, nothing, nothing, data, nothing, nothing, {})


@pytest.mark.parametrize(
    ("fields", "keep_best", "found"),
    [
        ({"early_stopping": {"patience": 2}}, 0,
         ["early_stopping: needs evaluations before the end"]),
        ({}, 1,
         ["eval_every: the checkpoint slot's keep_best compares evaluations: one is too few"]),
        ({"eval_every": 5, "result": "best"}, 0,
         ["result: the checkpoint slot does not keep the best checkpoint"]),
        ({"eval_every": 5, "result": "best", "early_stopping": {"patience": 2}}, 1, []),
        ({"early_stopping": {"patience": 0}}, 0, ["early_stopping.patience: must be more than 0"]),
    ],
)  # fmt: skip
def test_mistakes(fields: Any, keep_best: int, found: list[str]) -> None:
    view = plan_view({"checkpoint": ShardedCheckpoint(keep_best=keep_best)})
    slot = {"global_batch_size": 8, "steps": 10, **fields}
    told = [f"{one.key}: {one.message}" for one in problems(TrainCausalLm, slot, plan=view)]
    assert [text.partition(", not")[0] for text in told] == found


SAMPLES = ToySamples(2 * BLOCK + 3, 101, 3)
DATA = Data(train=SAMPLES, heldout=None, pad_id=0, identity={})


@dataclass
class Counter:
    """An engine that measures the length of each row, and is asked to stop at one of them."""

    stop_at: int | None = None
    ahead: int = 1
    """Micro-batches that it takes before it measures the first of them."""
    taken: int = 0
    device = torch.device("cpu")
    data_axis = DataAxis(index=0, count=1)

    def evaluate(self, batches: Iterable[MicroBatch], measure: Any) -> Iterator[Tensor]:
        held = []
        for batch in batches:
            held.append(torch.tensor([[batch.input_ids.shape[1]]]))
            self.taken += 1
            if self.taken == self.stop_at:
                signal.raise_signal(signal.SIGTERM)
            if len(held) == self.ahead:
                yield from held
                held = []
        yield from held

    def total(self, values: Tensor) -> Tensor:
        return values


def measured(engine: Any) -> Iterator[list[int] | None]:
    """Yield what is found of each block, until a stop."""
    dist = DistContext(device=torch.device("cpu"))
    with contextlib.suppress(Interrupted), dist.stop.deferred():
        for rows in rows_in_order(engine, RowLoss(), DATA, SAMPLES, 1, dist):
            yield None if rows is None else rows[:, 0].tolist()


LENGTHS = [len(SAMPLES[number].input_ids) for number in range(len(SAMPLES))]


@pytest.mark.parametrize("ahead", [1, 4, BLOCK + 1])
def test_blocks_are_whole_and_in_order(ahead: int) -> None:
    ends = [0, BLOCK, 2 * BLOCK, len(LENGTHS)]
    expected = [LENGTHS[start:end] for start, end in itertools.pairwise(ends)]
    assert [*measured(Counter(ahead=ahead))] == expected


@pytest.mark.parametrize("ahead", [1, 4])
def test_no_further_micro_batch_is_read_once_a_stop_is_asked_for(ahead: int) -> None:
    engine = Counter(stop_at=BLOCK + 3, ahead=ahead)
    assert [*measured(engine)] == [LENGTHS[:BLOCK], None]
    assert engine.taken == BLOCK + 3
