"""Pipelines under every schedule of torch: the numbers of a plain loop."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.distributed.process_group import DistContext
from stages.model.hf import ActivationCheckpointing
from tests.parity.body import BATCH, SEED, STEPS, tiny_source, train_case
from tests.parity.numbers import assert_same_numbers
from tests.parity.reference import reference
from tests.support.processes import run_ranks
from tests.support.runs import context, packed_data, toy_data
from tests.support.tier import spread

MODEL = {"num_hidden_layers": 8, "tie_word_embeddings": False}
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
GATHERED = {"sharding": "shard_grad_op"}
LORA = {"rank": 4, "alpha": 8.0}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    **{f"{name} on 2": (2, {"schedule": name}, {}) for name in SCHEDULES},
    "ZBVZeroBubble on 2": (2, {"schedule": "ZBVZeroBubble"}, {}),
    **{f"{name} on 4": (4, {"schedule": name}, {}) for name in SCHEDULES},
    "ZBVZeroBubble on 4": (4, {"schedule": "ZBVZeroBubble"}, {}),
    "recomputed": (2, {"schedule": "1F1B"}, {"recomputed": True}),
    "recomputed twice": (2, {"schedule": "ZBVZeroBubble"}, {"recomputed": True}),
    "packed": (2, {"schedule": "Interleaved1F1B"}, {"packed": True}),
    "in chunks": (2, {"schedule": "1F1B"}, {"loop": {"loss_chunk_size": 3}}),
    "lora": (2, {"schedule": "1F1B"}, {"lora": LORA}),
}
"""Ranks, fields of the pipeline, and features."""


@functools.cache
def plain_loop(*, packed: bool, adapted: bool) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        ctx = context(DistContext(device=torch.device("cpu")), folder, SEED)
        source = tiny_source(ctx, LORA if adapted else None, **MODEL)
    data = packed_data() if packed else toy_data()
    return reference(source, data, seed=SEED, steps=STEPS, batch=BATCH)


@pytest.mark.parametrize("name", spread(list(CASES), 4))
def test_the_numbers_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    ranks, pipeline, features = CASES[name]
    recomputed = features.pop("recomputed", False)
    hf = {"activation_checkpointing": ActivationCheckpointing()} if recomputed else None
    case = {
        "wrap": "wrap.fsdp",
        "fields": {"pipeline_parallel": {"size": ranks, **pipeline}, **GATHERED},
        "batching": {"micro_batch_size": 2},
        "model": MODEL,
        "hf": hf,
        **features,
    }
    packed, adapted = features.get("packed", False), "lora" in features
    expected = plain_loop(packed=packed, adapted=adapted)
    result = run_ranks(train_case, ranks, str(tmp_path), case, limit=300)[0]
    held = [name for name in expected[2] if not adapted or "lora" in name]
    assert len(held) > 8
    assert_same_numbers(result, expected, tmp_path / "final.safetensors", held)


def test_the_halves_of_backward_sum_gradients_in_fp32(tmp_path: Path) -> None:
    """FSDP does not see the half for weights; its sums would be those of bf16."""
    norms = []
    for schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        fields = {"pipeline_parallel": {"size": 2, "schedule": schedule}, **GATHERED}
        batching = {"micro_batch_size": 1}
        case = {"wrap": "wrap.fsdp", "fields": fields, "batching": batching, "model": MODEL}
        folder = tmp_path / schedule
        folder.mkdir()
        result = run_ranks(train_case, 2, str(folder), case | {"compute": "bf16"}, limit=300)[0]
        norms.append([one["grad_norm"] for one in result["records"] if "loss" in one])
    assert len(norms[0]) == STEPS
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
