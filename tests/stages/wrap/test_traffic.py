"""The traffic that is told is what real collectives move."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline import testing
from pipeline.planning.forecast import OptimizerShape
from pipeline.planning.planner import Topology
from stages.wrap.ddp import Ddp
from stages.wrap.ddp_planner import DdpPlanner
from stages.wrap.fsdp import Fsdp
from stages.wrap.fsdp_planner import FsdpPlanner
from stages.wrap.zero import Zero
from stages.wrap.zero.planner import ZeroPlanner
from tests.support.processes import run_ranks
from tests.support.runs import tiny_model
from tests.support.shapes import weights_alone
from tests.support.traffic import counted, policy

PLANNERS: dict[type, Any] = {Ddp: DdpPlanner, Fsdp: FsdpPlanner, Zero: ZeroPlanner}
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
    assert found == [told(wrap, ranks, tmp_path) for wrap in wraps]


def told(wrap: Any, ranks: int, folder: Path) -> dict[str, int]:
    """Collective -> bytes."""
    topology = Topology(ranks=ranks, local_ranks=ranks, device="cpu")
    profile = weights_alone(tiny_model(testing.context(folder), MODEL, ""))
    optimizer = OptimizerShape(algorithm="adamw", bits=64, moments=2)
    planner = PLANNERS[type(wrap)](wrap)
    strategy = planner.forecast(topology, profile, policy(wrap), optimizer)
    sums = Counter[str]()
    for one in strategy.traffic(MICROBATCHES):
        sums[one.collective] += one.bytes
    return dict(sums)
