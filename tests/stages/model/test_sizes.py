"""Sizes that no model has are refused by name before any is built."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.errors import StageError
from stages.model.assets import config_of_recipe
from stages.model.checks import problems
from stages.model.config_checks import wrong_size
from stages.model.hf import HfModel
from tests.support.runs import TINY

MOST = 2**31 - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": -64}, f"hidden_size is -64, expected a whole number from 1 to {MOST}"),
        ({"vocab_size": 10**30}, f"vocab_size is 1e+30, expected a whole number from 1 to {MOST}"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1e+09, expected .* from 0 to 1024"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1, expected .* from 0 to 1024"),
        ({"num_attention_heads": 0}, f"num_attention_heads is 0, expected .* from 1 to {MOST}"),
        ({"num_key_value_heads": -1}, f"num_key_value_heads is -1, expected .* from 1 to {MOST}"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1e.12, expected"),
    ],
)
def test_a_size_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StageError, match=message.replace("+", ".")):
        config_of_recipe(TINY | change)
    found = [problem.message for problem in problems(HfModel(config=TINY | change))]
    assert found == [wrong_size(TINY | change)]


def test_sizes_of_parts_and_sizes_that_can_be() -> None:
    assert wrong_size({"text_config": {"num_experts": -1}}).startswith("text_config.num_experts is")
    assert wrong_size({**TINY, "num_experts": 0, "pad_token_id": -1, "n_inner": None}) == ""
