"""Models whose attention does not divide among ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.errors import StageError
from stages.wrap.context_compat import reason_not_divisible, require_divisible
from tests.support.tensor import sized


def test_heads_that_do_not_divide_are_refused() -> None:
    config = sized("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=24)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    said = "has 3 attention heads, which do not divide among 2 ranks"
    with pytest.raises(StageError, match=said):
        require_divisible(model, 2, 1)


@pytest.mark.parametrize(
    ("config", "model", "said"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, {}, "of kind linear_attention"),
        ({}, {"_is_stateful": True}, "keeps a state along the sequence"),
        ({}, {"_supports_attention_backend": False}, "computes attention by itself"),
        ({"alibi": True}, {}, "adds biases by distance"),
        ({}, {}, ""),
    ],
)
def test_what_mixes_tokens_elsewhere_is_found(config: Any, model: Any, said: str) -> None:
    text = SimpleNamespace(**config)
    traits = {"_is_stateful": False, "_supports_attention_backend": True} | model
    found = reason_not_divisible(
        SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text), **traits)
    )
    assert said in found
    assert bool(said) == bool(found)
