"""Every strategy against a plain loop: the same losses, gradient norms and final weights."""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.contracts.precision import torch_dtype
from pipeline.distributed.process_group import DistContext
from tests.parity.body import BATCH, SEED, STEPS, tiny_source, train_case
from tests.parity.numbers import assert_same_numbers
from tests.parity.reference import reference
from tests.support.processes import run_ranks
from tests.support.runs import context, toy_data
from tests.support.strategies import STRATEGIES, having
from tests.support.tier import FULL

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

ACCUMULATE = {"micro_batch_size": 2}


def case(wrap: str, batching: dict[str, Any] = ACCUMULATE, **fields: Any) -> Any:
    return {"wrap": wrap, "fields": fields, "batching": batching}


CASES = [
    pytest.param(case(one.use, dict(one.batching), **one.fields), ranks, id=f"{name} on {ranks}")
    for name, one in STRATEGIES.items()
    for ranks in (one.parity if FULL or name in having("basic") else one.parity[-1:])
]
HALF = {name: case(one.use, **one.fields) for name, one in having("half").items()}


@functools.cache
def plain_loop(compute: torch.dtype = torch.float32) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        source = tiny_source(context(DistContext(device=torch.device("cpu")), folder, SEED))
    return reference(source, toy_data(), seed=SEED, steps=STEPS, batch=BATCH, compute=compute)


@pytest.mark.parametrize(("config", "ranks"), CASES)
def test_strategy_gives_the_numbers_of_a_plain_loop(
    config: Any, ranks: int, tmp_path: Path
) -> None:
    expected = plain_loop()
    result = run_ranks(train_case, ranks, str(tmp_path), config)[0]
    assert_same_numbers(result, expected, tmp_path / "final.safetensors")


@pytest.mark.parametrize("name", [name for name in HALF if name != "zero1"])
def test_bf16_master_weights_follow_the_plain_loop_as_far_as_they_can(
    name: str, tmp_path: Path
) -> None:
    losses, norms, _, _ = plain_loop(torch.bfloat16)
    config = {**HALF[name], "compute": "bf16", "master": "bf16"}
    result = run_ranks(train_case, 2, str(tmp_path), config)[0]
    steps = [record for record in result["records"] if "loss" in record]
    assert result["facts"]["master"] == ["bf16"]
    assert [record["loss"] for record in steps] == pytest.approx(losses, rel=3e-3)
    assert [record["grad_norm"] for record in steps] == pytest.approx(norms, rel=2e-2)
    # the norm is accumulated in fp32: bf16 has 8 bits, so few norms would be a multiple otherwise
    assert any(math.remainder(record["grad_norm"], 2**-8) for record in steps)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("name", HALF)
def test_a_precision_policy_means_the_same_under_every_strategy(
    name: str, compute: str, tmp_path: Path
) -> None:
    """Autocast under one strategy and cast parameters under another would differ by 10 %."""
    losses, norms, _, _ = plain_loop(torch_dtype(compute))
    result = run_ranks(train_case, 2, str(tmp_path), {**HALF[name], "compute": compute})[0]
    steps = [record for record in result["records"] if "loss" in record]
    assert all(record["applied"] for record in steps)
    assert [record["loss"] for record in steps] == pytest.approx(losses, rel=3e-4)
    assert [record["grad_norm"] for record in steps] == pytest.approx(norms, rel=3e-3)
