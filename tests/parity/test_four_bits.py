"""A model in 4 bits, whose bytes strategies hold, shard and gather as another dtype."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from pipeline.distributed.process_group import DistContext
from tests.parity.body import BATCH, SEED, STEPS, tiny_source, train_case
from tests.parity.combinations import LORA, RANKS
from tests.parity.reference import reference
from tests.support.processes import run_ranks
from tests.support.runs import context, toy_data
from tests.support.strategies import having

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

QLORA = {**LORA, "quantize": "nf4"}


@pytest.fixture(scope="module")
def expected() -> tuple[list[float], list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        ctx = context(DistContext(device=torch.device("cpu")), folder, SEED)
        source = tiny_source(ctx, QLORA).inference_view
        found = reference(
            source, toy_data(), seed=SEED, steps=STEPS, batch=BATCH, compute=torch.bfloat16
        )
    return found[:2]


def elements() -> int:
    """Return the number of elements of all weights, with none in 4 bits."""
    with tempfile.TemporaryDirectory() as folder:
        ctx = context(DistContext(device=torch.device("cpu")), folder, SEED)
        module = tiny_source(ctx, LORA).build()
    return sum(parameter.numel() for parameter in module.parameters())


STRATEGIES = {one.title: one for one in having("basic").values()}


@pytest.mark.parametrize("name", STRATEGIES)
def test_half_precision(
    name: str, expected: tuple[list[float], list[float]], tmp_path: Path
) -> None:
    losses, norms = expected
    one = STRATEGIES[name]
    given = {
        "wrap": one.use, "fields": dict(one.fields), "batching": {"micro_batch_size": 3},
        "lora": QLORA, "compute": "bf16",
    }  # fmt: skip
    result = run_ranks(train_case, RANKS, str(tmp_path), given)[0]
    assert result["facts"]["parameters"] == elements()
    steps = [record for record in result["records"] if "loss" in record]
    assert [record["loss"] for record in steps] == pytest.approx(losses, rel=3e-4)
    assert [record["grad_norm"] for record in steps] == pytest.approx(norms, rel=3e-3)
