"""Models of more than text, trained on text: the numbers of a plain loop, and nothing else held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.distributed.process_group import DistContext
from tests.parity.body import BATCH, SEED, STEPS, tiny_source, train_case
from tests.parity.numbers import assert_same_numbers
from tests.parity.reference import reference
from tests.support.multimodal import saved
from tests.support.processes import run_ranks
from tests.support.runs import context, packed_data, toy_data
from tests.support.tier import spread

CASES: list[tuple[str, str, dict[str, Any], bool]] = [
    ("gemma3", "wrap.ddp", {}, False),
    ("gemma3", "wrap.fsdp", {}, True),
    ("qwen3_5", "wrap.ddp", {}, False),
    ("qwen2_5_vl", "wrap.fsdp", {"context_parallel": {"size": 2}}, True),
    ("qwen2_5_vl", "wrap.fsdp", {"tensor_parallel": {"size": 2}}, False),
    ("mllama", "wrap.ddp", {}, False),
    ("llava", "wrap.zero", {"stage": 3}, True),
]


@pytest.mark.parametrize(("kind", "wrap", "fields", "packed"), spread(CASES, 4))
def test_the_numbers_of_a_plain_loop(
    kind: str, wrap: str, fields: dict[str, Any], packed: bool, tmp_path: Path
) -> None:
    place = tmp_path / "model"
    saved(kind, place)
    hf = {"path": str(place)}
    case = {
        "wrap": wrap,
        "fields": fields,
        "batching": {"micro_batch_size": 2},
        "hf": hf,
        "packed": packed,
    }
    result = run_ranks(train_case, 2, str(tmp_path), case, limit=300)[0]
    ctx = context(DistContext(device=torch.device("cpu")), str(tmp_path), SEED)
    data = packed_data() if packed else toy_data()
    expected = reference(tiny_source(ctx, fields=hf), data, seed=SEED, steps=STEPS, batch=BATCH)
    assert_same_numbers(result, expected, tmp_path / "final.safetensors")
    held = load_file(tmp_path / "final.safetensors").keys()
    assert not any("visual" in name or "vision" in name for name in held)
