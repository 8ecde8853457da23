"""The traffic that is told is what real collectives move."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pipeline.forecast.site import Site

from stages.optimizer.adamw import AdamW
from stages.wrap.ddp import Ddp
from stages.wrap.fsdp import Fsdp
from stages.wrap.zero import Zero
from tests.support.forecasts import declared
from tests.support.processes import run_ranks
from tests.support.runs import TINY
from tests.support.traffic import counted, policy

MODEL = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": False}
MICROBATCHES = 2
REPLICATED = [Ddp(), Fsdp(), Fsdp(sharding="shard_grad_op"), Fsdp(reduce_every_microbatch=False)]
HYBRID = [Fsdp(sharding="hybrid_shard", shard_size=2)]
SMALL = {"stage": 3, "param_persistence_threshold": 100}
ZERO = [
    Zero(stage=1),
    Zero(stage=2),
    Zero(stage=3),  # every parameter is small, and gathered after the update alone
    Zero(**SMALL),  # all are there until backward needs them again
    Zero(**SMALL, max_reuse_distance=0, prefetch_bucket_size=0),
]


@pytest.mark.parametrize(("wraps", "ranks"), [(REPLICATED, 2), (HYBRID, 4), (ZERO, 2)])
def test_what_collectives_move(wraps: list[Any], ranks: int, tmp_path: Path) -> None:
    found = run_ranks(counted, ranks, str(tmp_path), wraps, MODEL, MICROBATCHES)[0]
    assert found == [told(wrap, ranks) for wrap in wraps]


def told(wrap: Any, ranks: int) -> dict[str, int]:
    """Collective -> bytes."""
    site = Site(ranks=ranks, local_ranks=ranks, device="cpu")
    optimizer = AdamW(kernel="foreach").forecast(site, policy(wrap))
    placement = wrap.forecast(site, declared({**TINY, **MODEL}), policy(wrap), optimizer)
    sums = Counter[str]()
    for one in placement.traffic(MICROBATCHES):
        sums[one.collective] += one.bytes
    return dict(sums)
