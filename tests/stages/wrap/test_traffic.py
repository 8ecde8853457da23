"""Forecast traffic equals the bytes that collectives of real engines move."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline import testing
from pipeline.planning.planner import Planners
from pipeline.planning.shapes import OptimizerShape, Topology
from tests.support.processes import run_ranks
from tests.support.runs import tiny_model
from tests.support.shapes import weights_alone
from tests.support.strategies import SMALL_GROUPS, STRATEGIES, Strategy, having
from tests.support.traffic import counted, policy

PLANNERS = Planners.installed()
MODEL = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": False}
MICROBATCHES = 2
FORECAST = [one for one in having("basic").values() if PLANNERS.find(one.use)]
TORCH = [
    *(one for one in FORECAST if one.use != "wrap.zero"),
    STRATEGIES["fsdp grad-op"],
    STRATEGIES["fsdp reduce once"],
]
HYBRID = [STRATEGIES["fsdp hybrid"]]
SMALL = {"stage": 3, **SMALL_GROUPS}
ZERO = [
    *(one for one in FORECAST if one.use == "wrap.zero"),
    # Every parameter is small, and gathered only after the update.
    Strategy(use="wrap.zero", fields={"stage": 3}),
    # Parameters stay gathered until backward needs them again.
    Strategy(use="wrap.zero", fields=SMALL),
    Strategy(use="wrap.zero", fields={**SMALL, "max_reuse_distance": 0, "prefetch_bucket_size": 0}),
]


@pytest.mark.parametrize(("strategies", "ranks"), [(TORCH, 2), (HYBRID, 4), (ZERO, 2)])
def test_bytes_of_collectives(strategies: list[Strategy], ranks: int, tmp_path: Path) -> None:
    wraps = [one.stage() for one in strategies]
    found = run_ranks(counted, ranks, str(tmp_path), wraps, MODEL, MICROBATCHES)[0]
    assert found == [forecast(one, ranks, tmp_path) for one in strategies]


def forecast(one: Strategy, ranks: int, folder: Path) -> dict[str, int]:
    """Return the bytes by collective that the strategy's planner forecasts."""
    wrap, planner = one.stage(), PLANNERS.find(one.use)
    assert planner is not None
    topology = Topology(ranks=ranks, local_ranks=ranks, device="cpu")
    profile = weights_alone(tiny_model(testing.context(folder), MODEL, ""))
    optimizer = OptimizerShape(algorithm="adamw", bits=64, moments=2)
    memory: Any = planner(wrap).forecast(topology, profile, policy(wrap), optimizer)
    sums = Counter[str]()
    for moved in memory.traffic(MICROBATCHES):
        sums[moved.collective] += moved.bytes
    return dict(sums)
