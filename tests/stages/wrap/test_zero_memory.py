"""The plan of ZeRO's memory against the allocator on real runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.wrap.zero import OptimizerOffload, ParameterOffload
from tests.support.processes import run_ranks

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
OFFLOADED = {"offload_optimizer": OptimizerOffload(), "offload_param": ParameterOffload()}


@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.parametrize(
    "fields",
    [
        {"zero": {"stage": 1}},
        {"zero": {"stage": 2, "reduce_bucket_size": 500_000}},
        {"zero": {"stage": 3, "reduce_bucket_size": 500_000}},
        {"zero": {"stage": 3, "reduce_bucket_size": 500_000, **OFFLOADED}, "lora": {"rank": 64}},
    ],
)
def test_a_real_run_holds_what_was_planned(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import zero_memory
    import zero_memory_rank

    job = zero_memory_rank.Job(model=zero_memory.SMALL, micro_batches=2, **fields)
    ranks = run_ranks(zero_memory_rank.run_job, 2, str(tmp_path), job)
    rows = list(zero_memory.compared(job, 2, ranks))
    assert [row.phase for row in rows][-3:] == ["backward 2", "step", "between"]
    for row in rows:
        assert row.predicted == pytest.approx(row.measured, rel=0.05), row.phase
