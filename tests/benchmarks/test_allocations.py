"""Plans of a step's memory against the bytes that torch's allocator hands out on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import allocations
import allocations_rank
import pytest
from allocations import BOTH, BUCKET, LARGER, LORA, PACKED, THREE, small, zero

from tests.support.processes import run_ranks

CASES = (
    small("DDP", "ddp", {}),
    small("FSDP, nf4", "fsdp", {}, adapter=PACKED, model=LARGER),
    zero(2, strategy=BUCKET),
    zero(3, "LoRA, offload both", strategy=BUCKET | BOTH, adapter={"rank": 64}),
)
FURTHER = (
    zero(3, strategy=THREE),
    zero(3, "nf4", strategy=THREE, adapter=PACKED, model=LARGER),
    zero(3, "plus plus", strategy=BUCKET | {"plus_plus": {"secondary_partition": 2}}),
    small("DDP, no views", "ddp", {"gradient_as_bucket_view": False}, compute="fp32"),
    small("DDP, nf4", "ddp", {}, adapter=PACKED, model=LARGER),
    small("FSDP", "fsdp", {}),
    small("FSDP, LoRA", "fsdp", {}, adapter=LORA, model=LARGER),
    zero(1),
    zero(2, "nf4", strategy=BUCKET, adapter=PACKED, model=LARGER),
)


@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in FURTHER)],
    ids=lambda case: case.name,
)
def test_a_real_run_holds_what_was_planned(case: Any, tmp_path: Path) -> None:
    ranks = run_ranks(allocations_rank.measured, case.ranks, str(tmp_path), case)
    rows = list(allocations.compared(case, ranks))
    assert [row.phase for row in rows][-3:] == ["backward 2", "step", "between"]
    for row in rows:
        assert row.predicted == pytest.approx(row.measured, rel=0.05), row.phase
