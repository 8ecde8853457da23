"""Profiled steps: the arithmetic on a trace, and a real one."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.contracts.metrics import OWN, records
from pipeline.distributed.process_group import DistContext
from pipeline.errors import UsageError
from pipeline.planning.planner import Trial
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.optimizer.adamw import AdamW
from stages.planners import CausalLmPlanner, CheckpointPlanner
from stages.train.causal_lm import TrainCausalLm
from stages.train.meter import PEAKS
from stages.train.profiling import STEP, WAIT, Breakdown, Profiler, breakdown
from stages.train.settings import Anomalies, EarlyStopping
from tests.support.processes import run_ranks
from tests.support.runs import context, toy_data
from tests.support.state import Setting, make_engine, source


def event(name: str, start: float, end: float, tid: int = 1, cat: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": end - start, "tid": tid}


WHOLE = event(STEP, 100, 200, cat="user_annotation")


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        # no computation at that time
        ([event("gloo:all_reduce", 150, 170, tid=2)], 0.2),
        # partly at the same time
        ([event("gloo:all_reduce", 150, 170, tid=2), event("aten::mm", 140, 160)], 0.1),
        # overlapping events count once; events outside of the step do not count
        ([event("gloo:all_gather", 150, 170, 2), event("gloo:all_gather", 160, 220, 3)], 0.5),
        # events that only surround others, or wait, compute nothing
        (
            [
                event("gloo:all_reduce", 150, 170, tid=2),
                event("autograd::engine::evaluate_function: X", 140, 180),
                event("aten::mm", 150, 155),
                event("aten::norm", 155, 170),
                event("c10d::allreduce_", 160, 170),
                event("PythonSubclass", 156, 170),
            ],
            0.15,
        ),
        # other threads prepare data
        ([event("gloo:all_reduce", 150, 170, tid=2), event("aten::stack", 150, 170, tid=9)], 0.2),
        # on a GPU its kernels count, and concurrent work of the host does not
        (
            [
                event("ncclDevKernel_AllGather", 120, 160, 7, "kernel"),
                event("gemm", 100, 130, 8, "kernel"),
                event("Memcpy HtoD", 150, 155, 8, "gpu_memcpy"),
                event("aten::mm", 100, 200),
            ],
            0.25,
        ),
    ],
)
def test_communication_share(events: list[dict[str, Any]], expected: float) -> None:
    annotation = {"ph": "M", "name": "process_name"}
    found = breakdown([annotation, WHOLE, *events], ranks=2)
    assert found.communication == pytest.approx(expected)
    assert sum(found) == pytest.approx(1)


def test_what_a_step_went_to() -> None:
    """Computing counts before communication, and that before a wait for data."""
    events = [
        event("aten::mm", 100, 130),
        event("gloo:all_reduce", 120, 150, tid=2),
        event(WAIT, 140, 170, cat="user_annotation"),
    ]
    found = breakdown([WHOLE, *events], ranks=2)
    assert found == pytest.approx(Breakdown(compute=0.3, communication=0.2, data=0.2, idle=0.3))


def test_no_collective_is_no_communication_only_for_a_rank_alone() -> None:
    alone = breakdown([WHOLE, event("aten::mm", 100, 150)], ranks=1)
    assert alone == Breakdown(compute=0.5, communication=0.0, data=0.0, idle=0.5)
    found = breakdown([WHOLE, event("aten::mm", 100, 150)], ranks=2)
    assert found.compute == 0.5
    assert math.isnan(found.communication)


def train(dist: DistContext, folder: str, wrap: str) -> list[dict[str, Any]]:
    ctx, setting = context(dist, folder), Setting(wrap=wrap)
    plan = AdamW(schedule="constant", warmup_steps=0).run(ctx)
    engine = make_engine(ctx, setting, plan)
    checkpoints = ShardedCheckpoint().run(ctx, engine)
    loop = TrainCausalLm(
        global_batch_size=4, steps=4, log_every=10, profile_steps=(3, 9), eval_last=False
    )
    loop.run(ctx, engine, toy_data(), plan, checkpoints, source(ctx, setting))
    checkpoints.close()
    engine.close()
    return list(records(ctx.run_dir / "metrics.jsonl"))


@pytest.mark.parametrize("wrap", ["ddp", "fsdp full"])
def test_a_profiled_step_of_two_ranks(wrap: str, tmp_path: Path) -> None:
    *steps, saved, written = run_ranks(train, 2, str(tmp_path), wrap)[0]
    assert {*PEAKS, *(name for line in (*steps, saved, written) for name in line)} <= OWN
    assert [line["step"] for line in steps if line.get("profiled")] == [3]
    shares = [steps[2][f"{name}_share"] for name in Breakdown._fields]
    assert all(0 < share < 1 for share in shares)
    assert sum(shares) == pytest.approx(1)
    assert all(line["peak_host_memory_bytes"] > 0 for line in steps)
    assert all("eval_loss" not in line for line in steps)  # there are held-out samples
    assert written["checkpoint_seconds"] > 0
    assert saved["checkpoint_stall_seconds"] > 0
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        "step-00000003-rank-00000.json.gz",
        "step-00000003-rank-00001.json.gz",
    ]


def test_a_trial_of_a_training() -> None:
    stage = TrainCausalLm(
        global_batch_size=12,
        epochs=3.0,
        micro_batch_size=2,
        accumulation=3,
        eval_every=5,
        eval_first=True,
        result="best",
        early_stopping=EarlyStopping(patience=1),
        anomalies=Anomalies(non_finite="rollback", spike="rollback", spike_factor=2.0),
    )
    short = CausalLmPlanner(stage).for_benchmark(
        Trial(steps=7, profile=(7,), growth=Fraction(1, 2))
    )
    assert short == TrainCausalLm(
        global_batch_size=6,
        steps=7,
        micro_batch_size=2,
        eval_last=False,
        profile_steps=(7,),
        anomalies=Anomalies(non_finite="skip", spike="skip", spike_factor=2.0),
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, 6), ({"accumulation": 3}, 2), ({"accumulation": 4}, 2), ({"micro_batch_size": 5}, 5)],
)
def test_the_micro_batch_of_a_trial_is_frozen(fields: dict[str, int], expected: int) -> None:
    stage = TrainCausalLm(global_batch_size=12, steps=9, **fields)
    short = CausalLmPlanner(stage).for_benchmark(Trial(steps=7, growth=Fraction(3, 2), shares=2))
    assert (short.global_batch_size, short.micro_batch_size) == (18, expected)
    assert short.accumulation is None


def test_a_global_batch_that_is_no_whole_number() -> None:
    stage = TrainCausalLm(global_batch_size=10, steps=9)
    assert (
        CausalLmPlanner(stage)
        .for_benchmark(Trial(steps=7, growth=Fraction(1, 2)))
        .global_batch_size
        == 5
    )
    with pytest.raises(UsageError) as caught:
        CausalLmPlanner(stage).for_benchmark(Trial(steps=7, growth=Fraction(3, 4)))
    assert str(caught.value) == (
        "samples per process cannot stay: 10 samples a step x 3/4 would be 7.5 "
        "(--weak needs a global batch that divides evenly)"
    )


def test_a_trial_of_checkpoints_leaves_nothing_elsewhere() -> None:
    stage = ShardedCheckpoint(
        every=5, keep=None, keep_every=10, keep_best=2, folder="s3://b/c", start_from="./x",
        asynchronous=False,
    )  # fmt: skip
    assert CheckpointPlanner(stage).for_benchmark(Trial(steps=7)) == ShardedCheckpoint(
        keep=1, asynchronous=False
    )


def test_each_rank_writes_a_profile_of_its_own(tmp_path: Path) -> None:
    engine: Any = SimpleNamespace(
        data_axis=SimpleNamespace(index=0, count=1), device=torch.device("cpu"),
        total=lambda values: values,
    )  # fmt: skip
    for rank in range(2):
        dist = DistContext(rank=rank, world_size=2, device=torch.device("cpu"))
        profiler = Profiler([1], tmp_path / "profile", engine, dist)
        profiler.run(1, lambda: torch.ones(2) @ torch.ones(2))
    assert len(list((tmp_path / "profile").iterdir())) == 2
