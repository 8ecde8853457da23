"""Every strategy against a plain loop: the same losses, gradient norms and final weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.dist import Dist
from stages.wrap.zero.options import OptimizerOffload
from tests.parity.body import BATCH, SEED, STEPS, tiny_source, train_case
from tests.parity.reference import reference
from tests.support.processes import run_ranks
from tests.support.runs import context, toy_data

ACCUMULATE = {"micro_batch_size": 2}
UNEVEN = {"micro_batch_size": 3}


def case(wrap: str, format: str, batching: dict[str, Any] = ACCUMULATE, **fields: Any) -> Any:
    return {"wrap": wrap, "format": format, "fields": fields, "batching": batching}


TORCH_CASES = {
    "ddp": (case("wrap.ddp", "dcp"), (1, 2, 3)),
    "ddp uneven": (case("wrap.ddp", "dcp", UNEVEN, static_graph=False), (2,)),
    "fsdp full_shard": (case("wrap.fsdp", "dcp"), (1, 2, 3)),
    "fsdp full_shard reduce once": (case("wrap.fsdp", "dcp", reduce_every_microbatch=False), (2,)),
    "fsdp shard_grad_op": (case("wrap.fsdp", "dcp", UNEVEN, sharding="shard_grad_op"), (1, 2)),
    "fsdp no_shard": (case("wrap.fsdp", "dcp", sharding="no_shard"), (1, 2)),
    "fsdp hybrid_shard": (
        case("wrap.fsdp", "dcp", {"micro_batch_size": 1}, sharding="hybrid_shard", shard_size=2),
        (4,),
    ),
    "fsdp cpu_offload": (case("wrap.fsdp", "dcp", cpu_offload=True), (2,)),
    "fsdp by size": (
        case("wrap.fsdp", "dcp", units="size", unit_size=1000, forward_prefetch=1), (2,),
    ),
}  # fmt: skip
OFFLOAD = {"stage": 3, "offload_optimizer": OptimizerOffload(device="cpu")}
ZERO_CASES = {
    "zero1": (case("wrap.zero", "deepspeed", stage=1), (1, 2)),
    "zero2": (case("wrap.zero", "deepspeed", UNEVEN, stage=2), (1, 2, 3)),
    "zero3": (case("wrap.zero", "deepspeed", stage=3), (1, 2, 3)),
    "zero3 cpu_offload": (case("wrap.zero", "deepspeed", **OFFLOAD), (1, 2)),
}
CASES = [
    pytest.param(config, ranks, id=f"{name} on {ranks}")
    for name, (config, worlds) in {**TORCH_CASES, **ZERO_CASES}.items()
    for ranks in worlds
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    dist = Dist(device=torch.device("cpu"))
    ctx = context(dist, tmp_path_factory.mktemp("reference"), SEED)
    return reference(tiny_source(ctx), toy_data(), seed=SEED, steps=STEPS, batch=BATCH)


@pytest.mark.parametrize(("config", "ranks"), CASES)
def test_strategy_gives_the_numbers_of_a_plain_loop(
    config: Any, ranks: int, expected: Any, tmp_path: Path
) -> None:
    losses, norms, weights, heldout = expected
    result = run_ranks(train_case, ranks, str(tmp_path), config)[0]
    steps = [record for record in result["records"] if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert [record["loss"] for record in steps] == pytest.approx(losses, rel=1e-5)
    assert [record["grad_norm"] for record in steps] == pytest.approx(norms, rel=1e-4)
    assert result["metrics"]["eval_loss"] == pytest.approx(heldout, rel=1e-5)
    final = load_file(tmp_path / "final.safetensors")
    assert weights.keys() <= final.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(final[name], weight, rtol=0, atol=1e-4, msg=name)
    logging.getLogger("pipe.test").debug("facts: %s", result["facts"])
