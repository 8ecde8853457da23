"""Masters in bf16 and fp32, whole, sharded and offloaded, against a plain loop bit by bit."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pipeline.distributed.process_group import DistContext
from tests.parity.masters import compare, round_once
from tests.support.processes import run_ranks

pytestmark = pytest.mark.usefixtures("deepspeed_operators")


def case(wrap: str, master: str, **fields: Any) -> dict[str, Any]:
    return {"wrap": wrap, "master": master, "fields": fields}


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
HYBRID = {"sharding": "hybrid_shard", "shard_size": 2}
MASTERS: dict[int, dict[str, Any]] = {
    2: {
        "ddp bf16": case("wrap.ddp", "bf16"),
        "fsdp bf16": case("wrap.fsdp", "bf16"),
        "fsdp offloaded bf16": case("wrap.fsdp", "bf16", cpu_offload=True),
        "zero2 bf16": case("wrap.zero", "bf16", stage=2),
        "zero3 bf16": case("wrap.zero", "bf16", stage=3),
        "zero1 fp32": case("wrap.zero", "fp32", stage=1),
        "zero1 offloaded fp32": case("wrap.zero", "fp32", stage=1, **OFFLOADED),
        "zero3 offloaded fp32": case("wrap.zero", "fp32", stage=3, **OFFLOADED),
    },
    4: {
        "hybrid bf16": case("wrap.fsdp", "bf16", **HYBRID),
        "hybrid fp32": case("wrap.fsdp", "fp32", **HYBRID),
        "hybrid offloaded fp32": case("wrap.fsdp", "fp32", cpu_offload=True, **HYBRID),
        "zero1 fp32": case("wrap.zero", "fp32", stage=1),
    },
}
ROUNDINGS: dict[int, dict[str, Any]] = {
    2: {
        "ddp": case("wrap.ddp", "bf16"),
        "ddp again": case("wrap.ddp", "bf16"),
        "fsdp": case("wrap.fsdp", "bf16"),
        "zero3": case("wrap.zero", "bf16", stage=3),
    },
    4: {"hybrid": case("wrap.fsdp", "bf16", **HYBRID)},
}
CLOSE = 1e-6
"""Largest difference accepted: DeepSpeed's CPU Adam computes in another order. A step moves a
weight by 1e-3."""
CASES = [(ranks, name) for ranks, cases in MASTERS.items() for name in cases]
ROUNDED = [(ranks, name) for ranks, cases in ROUNDINGS.items() for name in cases]


def both(dist: DistContext, folder: str, ranks: int) -> list[Any]:
    """Run all comparisons on `ranks` ranks in one process group."""
    return [compare(dist, folder, MASTERS[ranks]), round_once(dist, folder, ROUNDINGS[ranks])]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Return the results of each rank by number of ranks."""
    folder = str(tmp_path_factory.mktemp("masters"))
    return {ranks: run_ranks(both, ranks, folder, ranks) for ranks in MASTERS}


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_weights_and_moments_are_those_of_the_plain_loop(ranks: int, name: str, found: Any) -> None:
    for masters, _ in found[ranks]:
        result = masters[name]
        assert result["elements"] > 0
        if "offloaded fp32" in name and "zero" in name:
            assert result["furthest"] < CLOSE
        else:
            assert result["different"] == 0, result


@pytest.mark.parametrize(("ranks", "name"), ROUNDED)
def test_weights_are_rounded_to_a_neighbour_with_the_right_mean(
    ranks: int, name: str, found: Any
) -> None:
    for _, rounded in found[ranks]:
        result = rounded[name]
        deviation = 0.5 / math.sqrt(result["elements"])
        # The plain loop's last bit of fp32 may differ, so a value that bf16 represents to within it
        # may be on either side.
        assert result["neither"] <= result["elements"] / 1000
        assert abs(result["bias"]) < 4 * deviation
        # Rounding to the nearest would round none of these up.
        assert abs(result["up"] - result["fraction"]) < 4 * 0.5 / math.sqrt(result["low"])


def test_replicas_and_repetitions_are_rounded_alike(found: Any) -> None:
    digests = [{name: one["digest"] for name, one in rounded.items()} for _, rounded in found[2]]
    assert digests[0]["ddp"] == digests[1]["ddp"] == digests[0]["ddp again"]
    assert digests[0]["fsdp"] != digests[1]["fsdp"]
    shards = [rounded["hybrid"]["digest"] for _, rounded in found[4]]
    assert (shards[0], shards[1]) == (shards[2], shards[3])
    assert shards[0] != shards[1]
