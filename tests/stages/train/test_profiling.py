"""Profiled steps: the arithmetic on a trace, and a real one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from pipeline.contracts.metrics import OWN, records
from pipeline.distributed.process_group import DistContext
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.optimizer.adamw import AdamW
from stages.train.causal_lm import TrainCausalLm
from stages.train.speed import STEP, WAIT, Breakdown, breakdown
from stages.train.step import PEAKS
from tests.support.processes import run_ranks
from tests.support.runs import context, toy_data
from tests.support.state import Setting, make_engine, source


def event(name: str, start: float, end: float, tid: int = 1, cat: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": end - start, "tid": tid}


WHOLE = event(STEP, 100, 200, cat="user_annotation")


REDUCE = event("gloo:all_reduce", 150, 170, tid=2)
SHARES: dict[str, tuple[list[dict[str, Any]], float]] = {
    "no computation at that time": ([REDUCE], 0.2),
    "partly at the same time": ([REDUCE, event("aten::mm", 140, 160)], 0.1),
    "overlapping events count once, and those outside of the step not": (
        [event("gloo:all_gather", 150, 170, 2), event("gloo:all_gather", 160, 220, 3)], 0.5,
    ),
    "events that only surround others, or wait, compute nothing": (
        [REDUCE, event("autograd::engine::evaluate_function: X", 140, 180),
         event("aten::mm", 150, 155), event("aten::norm", 155, 170),
         event("c10d::allreduce_", 160, 170), event("PythonSubclass", 156, 170)], 0.15,
    ),
    "other threads prepare data": ([REDUCE, event("aten::stack", 150, 170, tid=9)], 0.2),
    "on a GPU its kernels count, and concurrent work of the host does not": (
        [event("ncclDevKernel_AllGather", 120, 160, 7, "kernel"),
         event("gemm", 100, 130, 8, "kernel"), event("Memcpy HtoD", 150, 155, 8, "gpu_memcpy"),
         event("aten::mm", 100, 200)], 0.25,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("events", "expected"), SHARES.values(), ids=SHARES)
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
