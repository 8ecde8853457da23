"""Families that tensor parallelism divides differently: the numbers of a plain loop."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.distributed.process_group import DistContext
from stages.model.hf import ActivationCheckpointing, Compile
from tests.parity.body import BATCH, SEED, STEPS, tiny_source, train_case
from tests.parity.numbers import assert_same_numbers
from tests.parity.reference import reference
from tests.support.processes import run_ranks
from tests.support.runs import context, toy_data
from tests.support.tensor import FAMILIES, GPT2_PLAN, sized
from tests.support.tier import spread

RECOMPUTED = {
    "compile": Compile(backend="aot_eager"), "activation_checkpointing": ActivationCheckpointing(),
}  # fmt: skip
FEW_KEYS = sized("llama", num_key_value_heads=2)
COMPILED = ", compiled and recomputed"
CASES: dict[str, tuple[int, dict[str, Any], bool]] = {
    **{
        name: (2, config, number % 2 == 0) for number, (name, config) in enumerate(FAMILIES.items())
    },
    "qwen3, whole sequences": (2, FAMILIES["qwen3"], False),
    "gpt2, whole sequences": (2, FAMILIES["gpt2"], False),
    "fewer key heads than ranks": (4, FEW_KEYS, True),
    **{f"{name}{COMPILED}": (2, FAMILIES[name], name != "gpt2") for name in ("gpt2", "mixtral")},
    f"fewer key heads than ranks{COMPILED}": (4, FEW_KEYS, True),
    f"qwen3{COMPILED}": (2, FAMILIES["qwen3"], True),
}
"""Ranks of a group, the model, and whether activations are divided along the sequence."""


@functools.cache
def plain_loop(name: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        ctx = context(DistContext(device=torch.device("cpu")), folder, SEED)
        config = CASES[name][1]
        source = tiny_source(ctx, fields=fields_of(config), **config)
    return reference(source, toy_data(), seed=SEED, steps=STEPS, batch=BATCH)


def fields_of(config: dict[str, Any]) -> dict[str, Any]:
    return {"attention": "eager"} if config["model_type"] == "gemma2" else {}


@pytest.mark.parametrize("name", spread(list(CASES), 2))
def test_the_numbers_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    ranks, config, sequence = CASES[name]
    plan = GPT2_PLAN if config["model_type"] == "gpt2" else {}
    case = {
        "wrap": "wrap.fsdp",
        "fields": {"tensor_parallel": {"size": ranks, "sequence": sequence, "plan": plan}},
        "batching": {"micro_batch_size": 2},
        "model": config,
        "hf": {**fields_of(config), **(RECOMPUTED if name.endswith(COMPILED) else {})},
    }
    expected = plain_loop(name)
    result = run_ranks(train_case, ranks, str(tmp_path), case, limit=300)[0]
    assert_same_numbers(result, expected, tmp_path / "final.safetensors")
