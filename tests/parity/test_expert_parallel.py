"""Experts divided among ranks: the numbers of a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.body import train_case
from tests.parity.numbers import assert_same_numbers
from tests.parity.test_experts import LORA, plain_loop
from tests.support.moe import MOE, attention_of
from tests.support.processes import run_ranks
from tests.support.tier import spread

CASES = [
    pytest.param("olmoe", 2, {}, False, id="whole"),
    pytest.param("olmoe", 2, {}, True, id="lora"),
    pytest.param("olmoe", 4, {}, False, id="two shards of experts"),
    pytest.param(
        "olmoe", 4, {"sharding": "hybrid_shard", "shard_size": 2}, False, id="two replicas"
    ),
    pytest.param("olmoe", 4, {"context_parallel": {"size": 2}}, False, id="with context"),
    pytest.param("olmoe", 4, {"pipeline_parallel": {"size": 2}}, False, id="in a pipeline"),
]


@pytest.mark.parametrize(("kind", "ranks", "fields", "adapted"), spread(CASES, 2))
def test_the_numbers_of_a_plain_loop(
    kind: str, ranks: int, fields: dict[str, Any], adapted: bool, tmp_path: Path
) -> None:
    model = MOE[kind]
    case = {
        "wrap": "wrap.fsdp",
        "fields": {"expert_parallel": {"size": 2}, **fields},
        "batching": {"micro_batch_size": 2},
        "lora": LORA if adapted else None,
        "model": model,
        "hf": {"attention": attention_of(model)},
    }
    expected = plain_loop(kind, adapted)
    result = run_ranks(train_case, ranks, str(tmp_path), case, limit=300)[0]
    held = [name for name in expected[2] if not adapted or "lora" in name]
    assert sum("experts" in name for name in held) >= 2
    assert_same_numbers(result, expected, tmp_path / "final.safetensors", held)
