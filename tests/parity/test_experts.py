"""Mixtures of experts, whole and with adapters, under every strategy: the numbers of a plain loop.

Some experts get no token in a micro-batch: their part of the stacked weights has gradients of zero.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.distributed.process_group import DistContext
from stages.model.hf import ActivationCheckpointing
from tests.parity.body import BATCH, SEED, STEPS, tiny_source
from tests.parity.numbers import assert_same_numbers
from tests.parity.reference import reference
from tests.parity.test_combinations import train_all
from tests.support.moe import MOE, attention_of
from tests.support.processes import run_ranks
from tests.support.runs import context, toy_data
from tests.support.strategies import Strategy, having
from tests.support.tier import FULL, spread

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

LORA = {"rank": 4, "alpha": 8.0}
STRATEGIES = {one.title: one for one in having("basic").values()}
HOW = ("whole", "lora")
KINDS = spread(list(MOE), 1)
"""The quick tier trains one family, under one strategy of each engine."""


def case(kind: str, strategy: Strategy, *, adapted: bool) -> dict[str, Any]:
    hf: dict[str, Any] = {"attention": attention_of(MOE[kind])}
    if adapted:
        hf["activation_checkpointing"] = ActivationCheckpointing()
    return {
        "wrap": strategy.use,
        "fields": dict(strategy.fields),
        "batching": {"micro_batch_size": 2},
        "lora": LORA if adapted else None,
        "model": MOE[kind],
        "hf": hf,
    }


@pytest.fixture(
    scope="module", params=[t for t in STRATEGIES if FULL or t not in ("ZeRO-1", "ZeRO-2")]
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the results of every family, whole and with an adapter, under one strategy."""
    cases = {
        f"{kind} {how}": case(kind, STRATEGIES[request.param], adapted=how == "lora")
        for kind in KINDS
        for how in HOW
    }
    folder = tmp_path_factory.mktemp("experts")
    return run_ranks(train_all, 2, str(folder), cases, limit=900)[0]


@functools.cache
def plain_loop(kind: str, adapted: bool) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        ctx = context(DistContext(device=torch.device("cpu")), folder, SEED)
        fields = {"attention": attention_of(MOE[kind])}
        source = tiny_source(ctx, LORA if adapted else None, fields, **MOE[kind])
        return reference(source, toy_data(), seed=SEED, steps=STEPS, batch=BATCH)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_of_a_plain_loop(kind: str, how: str, trained: Any) -> None:
    adapted = how == "lora"
    expected = plain_loop(kind, adapted)
    result = trained[f"{kind} {how}"]
    held = [name for name in expected[2] if not adapted or "lora" in name]
    assert sum("experts" in name for name in held) >= 2
    assert_same_numbers(result, expected, Path(result["folder"]) / "final.safetensors", held)


def test_an_expert_without_tokens_has_gradients_of_zero(tmp_path: Path) -> None:
    source = tiny_source(
        context(DistContext(device=torch.device("cpu")), tmp_path, SEED), **MOE["qwen3_moe"]
    )
    model, reader = source.build(), source.weights()
    model.load_state_dict({name: reader.read(name) for name in reader.names()}, strict=False)
    model(input_ids=torch.tensor([[5, 17]])).logits.square().sum().backward()
    for block in model.model.layers:
        grad = block.mlp.experts.gate_up_proj.grad
        used = grad.abs().sum(dim=(1, 2)) > 0
        assert 2 <= int(used.sum()) <= 4
