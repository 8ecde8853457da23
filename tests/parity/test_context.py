"""Families that attend differently, with every sample's tokens divided among ranks: the numbers of
a plain loop."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.distributed.process_group import DistContext
from stages.wrap.context.compat import reason_not_divisible
from tests.parity.body import BATCH, SEED, STEPS, tiny_source, train_case
from tests.parity.numbers import assert_same_numbers
from tests.parity.reference import reference
from tests.support.processes import run_ranks
from tests.support.runs import context, packed_data, toy_data
from tests.support.tensor import sized
from tests.support.tier import spread

WINDOW = {"sliding_window": 5}
MODELS = {
    "one key head": sized("llama", num_key_value_heads=1),
    "qwen3": sized("qwen3", num_key_value_heads=2),
    "window": sized("mistral", **WINDOW),
    "window in every second block": sized(
        "gemma3_text", query_pre_attn_scalar=8, **WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip
CASES = [
    ("one key head", 4, "sdpa", False),
    ("one key head", 2, "eager", True),
    ("qwen3", 2, "sdpa", True),
    ("window", 2, "sdpa", False),
    ("window", 4, "eager", True),
    ("window in every second block", 2, "sdpa", True),
    ("window in every second block", 4, "sdpa", False),
]


@functools.cache
def plain_loop(model: str, attention: str, packed: bool) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        ctx = context(DistContext(device=torch.device("cpu")), folder, SEED)
        source = tiny_source(ctx, fields={"attention": attention}, **MODELS[model])
    data = packed_data() if packed else toy_data()
    return reference(source, data, seed=SEED, steps=STEPS, batch=BATCH)


@pytest.mark.parametrize(("model", "ranks", "attention", "packed"), spread(CASES, 2))
def test_the_numbers_of_a_plain_loop(
    model: str, ranks: int, attention: str, packed: bool, tmp_path: Path
) -> None:
    case = {
        "wrap": "wrap.fsdp",
        "fields": {"context_parallel": {"size": ranks}},
        "batching": {"micro_batch_size": 2},
        "model": MODELS[model],
        "hf": {"attention": attention},
        "packed": packed,
    }
    expected = plain_loop(model, attention, packed)
    result = run_ranks(train_case, ranks, str(tmp_path), case, limit=300)[0]
    assert_same_numbers(result, expected, tmp_path / "final.safetensors")


def refused(dist: DistContext, folder: str, config: dict[str, Any]) -> str:
    from pipeline.errors import StageError
    from stages.optimizer.adamw import AdamW
    from stages.precision.policy import PrecisionPolicy
    from stages.wrap.axes import ContextParallel
    from stages.wrap.ddp import Ddp

    ctx = context(dist, folder)
    wrap = Ddp(context_parallel=ContextParallel(size=2))
    precision = PrecisionPolicy(compute="fp32").run(ctx)
    try:
        wrap.run(ctx, tiny_source(ctx, **config), precision, AdamW().run(ctx))
    except StageError as error:
        return str(error)
    return ""


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    config = sized("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=24)
    for told in run_ranks(refused, 2, str(tmp_path), config):
        assert "has 3 attention heads, which do not divide among 2 ranks" in told


@pytest.mark.parametrize(
    ("config", "model", "said"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, {}, "of kind linear_attention"),
        ({}, {"_is_stateful": True}, "keeps a state along the sequence"),
        ({}, {"_supports_attention_backend": False}, "computes attention by itself"),
        ({"alibi": True}, {}, "adds biases by distance"),
        ({}, {}, ""),
    ],
)
def test_what_mixes_tokens_elsewhere_is_found(config: Any, model: Any, said: str) -> None:
    text = SimpleNamespace(**config)
    traits = {"_is_stateful": False, "_supports_attention_backend": True} | model
    found = reason_not_divisible(
        SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text), **traits)
    )
    assert said in found
    assert bool(said) == bool(found)
