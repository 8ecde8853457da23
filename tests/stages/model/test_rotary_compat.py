"""Rotary angles that depend on how long a text is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import StageError
from stages.model.checks import problems
from stages.model.config_checks import lengthwise_kind
from stages.model.hf import HfModel
from stages.model.rotary_compat import (
    choose_by_document,
    document_angles,
    document_lengths,
    with_positions,
)
from tests.support.batches import micro_batch
from tests.support.models import random_source, tiny_llama_config
from tests.support.tier import examples

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8,
    "short_factor": [1.0] * 3, "long_factor": [4.0, 5.0, 6.0],
}  # fmt: skip
CONFIGS = {
    "longrope": tiny_llama_config(rope_parameters=LONG),
    "dynamic": tiny_llama_config(rope_parameters=DYNAMIC, max_position_embeddings=8),
}


def rotary(kind: str, folder: Path) -> Any:
    """Return the rotary module of a tiny model."""
    model = random_source(CONFIGS[kind], folder).build()
    return model.get_submodule("model.rotary_emb")


def plain(module: Any, positions: torch.Tensor) -> list[torch.Tensor]:
    """Return what transformers gives, from a module that has computed nothing before."""
    fresh = copy.deepcopy(module)
    return list(type(module).forward(fresh, torch.zeros(1), positions))


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3))
@examples(30)
def test_the_length_of_each_tokens_document(rows: list[list[int]]) -> None:
    longest = max(map(sum, rows))
    positions, expected = [], []
    for row in rows:
        lengths = [*row, longest - sum(row)]  # the last is padding
        positions.append([place for length in lengths for place in range(length)])
        expected.append([length for length in lengths for _ in range(length)])
    assert document_lengths(torch.tensor(positions)).tolist() == expected


def test_positions_of_padding_begin_anew() -> None:
    ids = torch.zeros(2, 5, dtype=torch.int64)
    real = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    placed = with_positions(micro_batch(ids, ids, real=real))
    assert placed.positions is not None
    assert placed.positions.tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]]
    assert placed.documents == [[5], [5]]


@pytest.mark.parametrize("kind", CONFIGS)
def test_each_document_has_the_angles_of_transformers_for_it(kind: str, tmp_path: Path) -> None:
    module = rotary(kind, tmp_path)
    lengths = [3, 8, 9, 20, 14]
    documents = [torch.arange(length)[None] for length in lengths]
    expected = [plain(module, one) for one in documents]
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for order in ([3, 0, 4, 1, 2], [0, 1, 2, 3, 4]):
        packed = torch.cat([documents[number] for number in order], dim=1)
        for found, parts in zip(
            module(torch.zeros(1), packed),
            zip(*(expected[number] for number in order), strict=True),
            strict=True,
        ):
            assert torch.equal(found, torch.cat(parts, dim=1))
    assert all(torch.equal(buffers[name], buffer) for name, buffer in module.named_buffers())
    assert set(buffers) == {name for name, _ in module.named_buffers()}
    assert not torch.equal(expected[3][0][:, :3], expected[0][0])  # lengths do make a difference


def test_a_part_of_the_positions_with_lengths_from_elsewhere(tmp_path: Path) -> None:
    module = rotary("longrope", tmp_path)
    whole = torch.arange(20)[None]
    (angles,) = document_angles(module)
    angles.lengths = lambda own: document_lengths(whole)[..., :4]
    cosines, _ = module(torch.zeros(1), whole[:, :4])
    assert torch.equal(cosines, plain(module, whole)[0][:, :4])


def test_other_models_are_left_as_they_are(tmp_path: Path) -> None:
    model = random_source(tiny_llama_config(), tmp_path).build()
    assert not list(document_angles(model))


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"rope_scaling": {"type": "su"}}, "su"),
        ({"text_config": {"rope_parameters": {"rope_type": "dynamic"}}}, "dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "longrope"),
        ({"rope_parameters": {"rope_type": "yarn"}, "quantization": {"type": "dynamic"}}, None),
    ],
)
def test_the_kind_that_a_config_states(config: dict[str, Any], kind: str | None) -> None:
    assert lengthwise_kind(config) == kind


def test_code_of_a_model_is_refused(tmp_path: Path) -> None:
    model = random_source(CONFIGS["longrope"], tmp_path).build()
    type(model).__module__, before = "transformers_modules.mine", type(model).__module__
    try:
        with pytest.raises(StageError, match="of kind longrope, and depend on the longest row"):
            choose_by_document(model)
    finally:
        type(model).__module__ = before


def test_check_refuses_it_too() -> None:
    config = {**CONFIGS["longrope"], "auto_map": {}}
    found = list(problems(HfModel(config=config, trust_remote_code=True)))
    assert any("depend on the longest row of a batch" in one.message for one in found)
    assert not list(problems(HfModel(config=CONFIGS["longrope"])))
    v4 = {"model_type": "deepseek_v4", "rope_parameters": DYNAMIC}
    assert any("longest row" in one.message for one in problems(HfModel(config=v4)))
