"""Models of more than text, trained on text: the numbers of a plain loop, and nothing else held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.distributed.process_group import DistContext
from stages.model.declared import outline
from tests.parity.body import BATCH, SEED, STEPS, tiny_source, train_case
from tests.parity.numbers import assert_same_numbers
from tests.parity.reference import reference
from tests.support.multimodal import saved, whole_source
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


@pytest.mark.parametrize(
    ("wrap", "fields"),
    [
        pytest.param("wrap.fsdp", {}, id="fsdp"),
        pytest.param("wrap.ddp", {}, id="ddp", marks=pytest.mark.full),
        pytest.param("wrap.zero", {"stage": 3}, id="zero3", marks=pytest.mark.full),
    ],
)
def test_a_frozen_tower_in_the_module_changes_no_number(
    wrap: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Next to its tower, text has the numbers of the language model; FSDP shards both."""
    place = tmp_path / "model"
    saved("gemma3", place)
    towers = ("model.vision_tower.*", "model.multi_modal_projector.*")
    case = {
        "wrap": wrap, "fields": fields, "batching": {"micro_batch_size": 2}, "towers": True,
        "hf": {"path": str(place), "frozen": towers},
    }  # fmt: skip
    result = run_ranks(train_case, 2, str(tmp_path), case, limit=300)[0]
    ctx = context(DistContext(device=torch.device("cpu")), str(tmp_path), SEED)
    text = tiny_source(ctx, fields={"path": str(place)})
    expected = reference(text, toy_data(), seed=SEED, steps=STEPS, batch=BATCH)
    assert_same_numbers(result, expected, tmp_path / "final.safetensors")
    assert load_file(tmp_path / "final.safetensors").keys() <= {*text.weights().names()}
    every = sum(one.numel() for one in outline(whole_source(ctx, **case["hf"])).parameters())
    trained = sum(one.numel() for one in outline(text).parameters())
    assert (result["facts"]["parameters"], result["facts"]["trained_parameters"]) == (
        every,
        trained,
    )
    if wrap == "wrap.fsdp":  # the tower's block, those of text, and the root with the embedding
        assert result["facts"]["units"] == 1 + 2 + 1
