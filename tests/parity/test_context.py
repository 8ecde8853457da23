"""Families that attend differently, with every sample's tokens divided among ranks: the numbers of
a plain loop."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.distributed.process_group import DistContext
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
