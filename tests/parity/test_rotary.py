"""Rotary angles that depend on how long a text is: the numbers of texts that are computed one by
one by transformers itself, under every layout."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.distributed.process_group import DistContext
from stages.model import source as model_source
from tests.parity.body import BATCH, SEED, STEPS, tiny_source, train_case
from tests.parity.numbers import assert_same_numbers
from tests.parity.reference import reference
from tests.support.processes import run_ranks
from tests.support.runs import context, packed_data, toy_data
from tests.support.tensor import sized
from tests.support.tier import spread

LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 6,
    "short_factor": [1.0] * 4, "long_factor": [4.0, 5.0, 6.0, 8.0],
}  # fmt: skip
MODELS = {
    "longrope": sized(
        "phi3", rope_parameters=LONG, max_position_embeddings=24,
        original_max_position_embeddings=6,
    ),
    "dynamic": sized(
        "llama", max_position_embeddings=6,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    ),
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "ddp": (1, "wrap.ddp", {}),
    "context": (2, "wrap.fsdp", {"context_parallel": {"size": 2}}),
    "pipeline": (2, "wrap.fsdp", {"pipeline_parallel": {"size": 2}}),
    "tensor": (2, "wrap.fsdp", {"tensor_parallel": {"size": 2}}),
    "context and tensor": (
        4, "wrap.fsdp", {"context_parallel": {"size": 2}, "tensor_parallel": {"size": 2}},
    ),
    "zero": (2, "wrap.zero", {"stage": 3}),
}  # fmt: skip
CASES = [
    (layout, model, packed) for packed in (False, True) for layout in LAYOUTS for model in MODELS
]


@functools.cache
def one_by_one(model: str, packed: bool) -> Any:
    """Return the numbers of a plain loop over documents. A module of dynamic NTK that transformers
    has computed with remembers the longest, so only LongRoPE is transformers' own here."""
    data = packed_data() if packed else toy_data()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if model == "longrope":
            patch.setattr(model_source, "choose_by_document", lambda model: None)
        ctx = context(DistContext(device=torch.device("cpu")), folder, SEED)
        source = tiny_source(ctx, **MODELS[model])
        return reference(source, data, seed=SEED, steps=STEPS, batch=BATCH)


@pytest.mark.parametrize(("layout", "model", "packed"), spread(CASES, 5))
def test_the_numbers_of_texts_one_by_one(
    layout: str, model: str, packed: bool, tmp_path: Path
) -> None:
    ranks, wrap, fields = LAYOUTS[layout]
    case = {
        "wrap": wrap,
        "fields": fields,
        "batching": {"micro_batch_size": 4 if ranks == 1 else 2},
        "model": MODELS[model],
        "packed": packed,
    }
    result = run_ranks(train_case, ranks, str(tmp_path), case, limit=300)[0]
    assert_same_numbers(result, one_by_one(model, packed), tmp_path / "final.safetensors")
