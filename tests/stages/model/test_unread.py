"""The fates of tensors that are not read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.errors import StageError
from stages.model.unread import sized, sort_out
from stages.weights.torch_files import MemoryReader


def fates(names: str, wanted: str = "", towers: str = "", **stated: Any) -> tuple[list[str], ...]:
    found = sort_out(names.split(), wanted.split(), towers.split(), stated)
    return found.passed, found.dropped, found.undeclared


def test_each_tensor_that_is_not_read_has_a_fate() -> None:
    assert fates("a b c", wanted="a") == ([], [], ["b", "c"])
    assert fates("a b c", wanted="a", towers="c", b="drop") == (["c"], ["b"], [])
    assert fates("a b c", wanted="a", b="pass_through", c="drop") == (["b"], ["c"], [])
    assert fates("a b", wanted="a b", b="drop") == ([], ["b"], [])


def test_the_first_pattern_that_matches_counts() -> None:
    found = sort_out(["mtp.a", "mtp.b"], [], [], {"mtp.a": "drop", "mtp.*": "pass_through"})
    assert (found.passed, found.dropped) == (["mtp.b"], ["mtp.a"])


@pytest.mark.parametrize(
    "name",
    ["h.0.attn.bias", "gpt_neox.layers.1.attention.masked_bias", "model.rotary_emb.inv_freq",
     "embeddings.position_ids", "rope_freqs.weight", "h.0.crossattention.bias"],
)  # fmt: skip
def test_computed_tables_are_dropped(name: str) -> None:
    assert fates(name) == ([], [name], [])


@pytest.mark.parametrize(
    "name", ["h.0.attn.c_attn.bias", "model.layers.0.self_attn.q_proj.bias", "attention_bias"]
)
def test_weights_are_no_tables(name: str) -> None:
    assert fates(name) == ([], [], [name])


def test_fates_that_cannot_be() -> None:
    with pytest.raises(StageError, match="b cannot be dropped"):
        fates("a b", towers="b", b="drop")
    with pytest.raises(StageError, match="a is used, and so cannot be passed through"):
        fates("a b", wanted="a", a="pass_through")


def test_number_bytes_and_names() -> None:
    held = MemoryReader({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.bfloat16)})
    assert sized(["a", "b"], held) == "2 tensors, 16 B (a, b)"
    assert sized(["b"], held) == "1 tensor, 4 B (b)"
