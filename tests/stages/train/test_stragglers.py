"""Ranks that hold up the others are named, with their share of a step."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pipeline.contracts.metrics import OWN, Metrics, records
from pipeline.distributed.process_group import DistContext
from stages.train import stragglers
from stages.train.stragglers import Figures, StragglerWatch
from tests.support.processes import run_ranks
from tests.support.runs import context


def named(*figures: Figures) -> list[tuple[int, float, str]]:
    return [(rank, round(share, 3), why) for rank, share, why in stragglers.stragglers(figures)]


def test_a_wait_for_data() -> None:
    calm, late = Figures(1.0, 0.02, 0.003), Figures(1.0, 0.4, 0.003)
    assert named(calm, late, calm) == [(1, 0.38, "it waits 0.4 s for data, the others 0.02 s")]
    assert named(calm, Figures(1.0, 0.1, 0.003), calm) == []  # too small a share
    assert named(late, late, late) == []  # all wait alike


def test_slow_arithmetic() -> None:
    calm, slow = Figures(1.0, 0.0, 0.003), Figures(1.0, 0.0, 0.006)
    assert named(calm, calm, slow, calm) == [
        (2, 0.5, "it takes 2.0 times as long for the same arithmetic")
    ]
    assert named(calm, Figures(1.0, 0.0, 0.004)) == []
    assert named(slow) == []


def _train(dist: DistContext, folder: str) -> list[dict[str, Any]]:
    ctx = context(dist, folder)
    ctx.metrics = Metrics(ctx.run_dir / "metrics.jsonl" if dist.is_main else None)
    watch, looked = StragglerWatch(ctx), []
    for step in range(1, 2 * stragglers.EVERY + 1):
        began = time.perf_counter()
        time.sleep(0.01 * dist.rank)
        data = time.perf_counter() - began
        dist.barrier()
        if watch.look(step, seconds=time.perf_counter() - began, data=data):
            looked.append(step)
    assert looked == [stragglers.EVERY, 2 * stragglers.EVERY]
    return list(records(ctx.run_dir / "metrics.jsonl")) if dist.is_main else []


def test_a_rank_that_is_late(tmp_path: Any) -> None:
    found = run_ranks(_train, 2, str(tmp_path))[0]
    assert all(one["time"] > 1.7e9 for one in found)
    assert {name for one in found for name in one} <= OWN
    late = [one for one in found if "for data" in one["why"]]
    assert [(one["step"], one["straggler"]) for one in late] == [(25, 1), (50, 1)]
    assert late[0]["share"] == pytest.approx(1, abs=0.5)
