"""wrap.fsdp with the embedding and the head in units of their own against a plain loop."""

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
from tests.support.runs import context, toy_data
from tests.support.tier import spread

UNTIED = {"tie_word_embeddings": False}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "in chunks": (2, {}, {"loss_chunk_size": 5}),
    "reduced once, in chunks": (2, {"reduce_every_microbatch": False}, {"loss_chunk_size": 5}),
    "all logits": (3, {}, {}),
    "grad op": (2, {"sharding": "shard_grad_op"}, {}),
    "hybrid": (4, {"sharding": "hybrid_shard", "shard_size": 2}, {}),
    "ahead": (2, {"forward_prefetch": 1, "backward_prefetch": 2}, {}),
    "offload": (2, {"cpu_offload": True}, {"loss_chunk_size": 5}),
    "alone": (1, {}, {}),
}
"""Ranks, and fields of the wrap and the train slot."""


@functools.cache
def plain_loop() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        ctx = context(DistContext(device=torch.device("cpu")), folder, SEED)
        source = tiny_source(ctx, **UNTIED)
    return reference(source, toy_data(), seed=SEED, steps=STEPS, batch=BATCH)


@pytest.mark.parametrize("name", spread([*CASES], 3))
def test_units_change_no_number(name: str, tmp_path: Path) -> None:
    ranks, fields, loop = CASES[name]
    size = {1: 2, 2: 2, 3: 3, 4: 1}[ranks]
    case = {
        "wrap": "wrap.fsdp", "fields": fields, "model": UNTIED, "loop": loop,
        "batching": {"micro_batch_size": size},
    }  # fmt: skip
    result = run_ranks(train_case, ranks, str(tmp_path), case)[0]
    assert result["facts"]["units"] == 6
    assert_same_numbers(result, plain_loop(), tmp_path / "final.safetensors")
