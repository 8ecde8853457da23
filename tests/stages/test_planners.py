"""Temporary memory of updates, as compiled code has it, and stages cut short for a trial."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import testing
from pipeline.contracts.optimizer import Precision
from pipeline.errors import UsageError
from pipeline.planning.planner import Trial
from pipeline.planning.shapes import Topology
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.optimizer.adamw import AdamW, Kernel, Moments
from stages.planners import AdamWPlanner, CausalLmPlanner, CheckpointPlanner
from stages.train.causal_lm import TrainCausalLm
from stages.train.settings import Anomalies, EarlyStopping

ALLOCATED = re.compile(r"buf\d+ = empty_strided_\w+\(\(([\d, ]*)\), .*?, torch\.(\w+)\)")
HERE = Topology(ranks=1, local_ranks=1, device="cpu")
POLICY = Precision(master="fp32", compute="bf16", reduce="fp32", buffer=None, loss_scaling=None)


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_buffers_of_compiled_updates(moments: Moments, tmp_path: Path) -> None:
    from torch._inductor.utils import run_and_get_code

    weight = torch.nn.Parameter(torch.randn(1 << 16))
    weight.grad = torch.randn_like(weight)
    stage = AdamW(moments=moments)
    (part,) = stage.run(testing.context(tmp_path)).parts
    optimizer = part.build([{"params": [weight]}])
    _, (code,) = run_and_get_code(optimizer.step)
    held = [
        math.prod(map(int, re.findall(r"\d+", shape))) * getattr(torch, dtype).itemsize
        for shape, dtype in ALLOCATED.findall(code)
    ]
    told = AdamWPlanner(stage).forecast(HERE, POLICY)
    assert told.update(weight.numel()) == pytest.approx(sum(held), rel=0.01)


@pytest.mark.parametrize(("kernel", "each"), [("fused", 0), ("single", 32)])
def test_what_torchs_kernels_take(kernel: Kernel, each: int) -> None:
    """Ten elements in parameters of at most four need copies in fp32."""
    told = AdamWPlanner(AdamW(kernel=kernel)).forecast(HERE, POLICY)
    assert told.update(4) == each


def short(stage: TrainCausalLm, **trial: Any) -> TrainCausalLm:
    made: TrainCausalLm = CausalLmPlanner(stage).for_benchmark(Trial(steps=7, **trial))
    return made


def test_a_trial_of_a_training() -> None:
    batch: dict[str, Any] = {"micro_batch_size": 2, "accumulation": 3}
    stage = TrainCausalLm(
        **batch, global_batch_size=12, epochs=3.0, eval_every=5, eval_first=True, result="best",
        early_stopping=EarlyStopping(patience=1),
        anomalies=Anomalies(non_finite="rollback", spike="rollback", spike_factor=2.0),
    )  # fmt: skip
    assert short(stage, profile=(7,), growth=Fraction(1, 2)) == TrainCausalLm(
        global_batch_size=6, steps=7, micro_batch_size=2, eval_last=False, profile_steps=(7,),
        anomalies=Anomalies(non_finite="skip", spike="skip", spike_factor=2.0),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, 6), ({"accumulation": 3}, 2), ({"accumulation": 4}, 2), ({"micro_batch_size": 5}, 5)],
)
def test_the_micro_batch_of_a_trial_is_frozen(fields: dict[str, int], expected: int) -> None:
    stage = TrainCausalLm(global_batch_size=12, steps=9, **fields)
    made = short(stage, growth=Fraction(3, 2), shares=2)
    assert (made.global_batch_size, made.micro_batch_size) == (18, expected)
    assert made.accumulation is None


def test_a_global_batch_that_is_no_whole_number() -> None:
    stage = TrainCausalLm(global_batch_size=10, steps=9)
    assert short(stage, growth=Fraction(1, 2)).global_batch_size == 5
    with pytest.raises(UsageError) as caught:
        short(stage, growth=Fraction(3, 4))
    assert str(caught.value) == (
        "samples per process cannot stay: 10 samples a step x 3/4 would be 7.5 "
        "(--weak needs a global batch that divides evenly)"
    )


def test_a_trial_of_checkpoints_leaves_nothing_elsewhere() -> None:
    stage = ShardedCheckpoint(
        every=5, keep=None, keep_every=10, keep_best=2, folder="s3://b/c", start_from="./x",
        asynchronous=False,
    )  # fmt: skip
    made = CheckpointPlanner(stage).for_benchmark(Trial(steps=7))
    assert made == ShardedCheckpoint(keep=1, asynchronous=False)
