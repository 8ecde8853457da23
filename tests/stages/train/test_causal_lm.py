"""Settings of train.causal_lm, and failures of the loop that a user can meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.contracts.engine import DataAxis
from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError
from pipeline.testing import plan_view
from stages.batches.feed import Feed, microbatch_ranges
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from stages.train.causal_lm import TrainCausalLm
from stages.wrap.ddp import Ddp
from stages.wrap.fsdp import Fsdp
from tests.parity.body import tiny_source
from tests.support.batches import accumulated, micro_batch
from tests.support.processes import run_ranks
from tests.support.runs import context, toy_data


def problems(procs: int = 4, **fields: Any) -> list[str]:
    view = plan_view({}, procs=procs)
    return [f"{p.key}: {p.message}" for p in TrainCausalLm(**fields).check(view)]


def test_exactly_one_of_steps_and_epochs() -> None:
    assert problems(global_batch_size=8) == ["steps: give exactly one of steps and epochs"]
    assert problems(global_batch_size=8, steps=1, epochs=1.0)
    assert problems(global_batch_size=8, steps=1) == []


def test_contradicting_batch_sizes_show_the_arithmetic() -> None:
    given = {"global_batch_size": 32, "steps": 1, "micro_batch_size": 2, "accumulation": 3}
    assert "2 x 3 x 4 = 24" in problems(**given)[0]
    assert problems(**{**given, "global_batch_size": 24}) == []


def test_steps_over_epochs_name_the_override_to_add() -> None:
    stage = TrainCausalLm(global_batch_size=8, steps=1, epochs=1.0)
    view = plan_view({"loop": stage})
    hint = "remove one of the two lines, or add loop.epochs=null to the command line"
    assert [one.hint for one in stage.check(view)] == [hint]


@pytest.mark.parametrize(("procs", "share"), [(1, 8), (2, 4), (3, 3)])
def test_a_micro_batch_larger_than_its_step_is_said(procs: int, share: int) -> None:
    """The ranges that training cuts are the ones that the warning names."""
    stage = TrainCausalLm(global_batch_size=8, steps=1, micro_batch_size=16)
    view = plan_view({"loop": stage}, procs=procs)
    (told,) = stage.check(view)
    assert told.warning
    assert told.message.endswith(f": micro-batches have {share}")
    cut = [microbatch_ranges(8, DataAxis(index=index, count=procs), 16) for index in range(procs)]
    assert max(end - start for ranges in cut for start, end in ranges) == share
    assert problems(procs, global_batch_size=8, steps=1, micro_batch_size=share) == []


@pytest.mark.parametrize(
    ("fields", "ranks", "expected"),
    [
        ({"micro_batch_size": 3}, 2, 3),
        ({"accumulation": 4}, 2, 4),
        ({"accumulation": 3}, 2, 6),
        ({}, 2, 16),
        ({}, 5, 7),
    ],
)
def test_micro_batch_is_given_or_derived(fields: Any, ranks: int, expected: int) -> None:
    assert TrainCausalLm(global_batch_size=32, steps=1, **fields).microbatch_size(ranks) == expected


def test_epochs_of_less_than_a_sample_are_refused() -> None:
    config = TrainCausalLm(global_batch_size=4, epochs=0.01)
    with pytest.raises(StageError, match="less than one sample"):
        Feed(config, toy_data(40), 0, DataAxis(index=0, count=1), torch.device("cpu"))


def one_shard_overflows(dist: DistContext, folder: str) -> list[Any]:
    """Train with an infinity in rank 0's part of one gradient only."""
    ctx = context(dist, folder)
    plan = AdamW(lr=1e-3).run(ctx)
    engine = Fsdp().run(ctx, tiny_source(ctx), PrecisionPolicy(compute="fp16").run(ctx), plan)
    parameter = next(engine.parts[0].parameters())
    before = parameter.detach().to_local().clone()
    applied = []
    for overflow in (True, False):
        tokens = torch.arange(6)[None]
        accumulated(engine, [micro_batch(tokens, tokens)], 6)
        if overflow and dist.is_main:
            parameter.grad.to_local()[0, 0] = float("inf")
        report = engine.step(lr_scales=[1.0])
        changed = not torch.equal(before, parameter.detach().to_local())
        applied.append([report.applied, report.loss_scale, changed])
    return applied


def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    for rank in run_ranks(one_shard_overflows, 2, str(tmp_path)):
        assert rank == [[False, 65536.0, False], [True, 32768.0, True]]


def narrow(dist: DistContext, folder: str, compute: Any) -> list[Any]:
    """Train in fp16 with a loss scale that overflows at once: skipped steps, falling scale."""
    ctx = context(dist, folder)
    plan = AdamW(lr=1e-3).run(ctx)
    policy = PrecisionPolicy(compute=compute, initial_loss_scale=2.0**24)
    engine = Ddp().run(ctx, tiny_source(ctx), policy.run(ctx), plan)
    loop = TrainCausalLm(global_batch_size=4, steps=20, log_every=20)
    checkpoints = ShardedCheckpoint().run(ctx, engine)
    trained = loop.run(ctx, engine, toy_data(), plan, checkpoints, tiny_source(ctx))
    lines = [json.loads(line) for line in (ctx.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    return [[s["applied"], s["loss_scale"]] for s in steps] + [trained.progress.skipped]


def test_overflow_skips_the_step_and_halves_the_scale(tmp_path: Path) -> None:
    *steps, skipped = run_ranks(narrow, 1, str(tmp_path), "fp16")[0]
    applied = [step[0] for step in steps]
    assert applied[0] is False
    assert any(applied)
    assert skipped == applied.count(False)
    scale = 2.0**24
    for was_applied, at_scale in steps:
        assert at_scale == scale
        scale = at_scale if was_applied else at_scale / 2
