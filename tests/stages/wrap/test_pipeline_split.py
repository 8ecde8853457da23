"""Models cut down to the layers of a stage."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.errors import StageError
from stages.wrap.pipeline_compat import Stage
from stages.wrap.pipeline_split import keep_layers, layer_list
from tests.support.batches import micro_batch

TINY = {"vocab_size": 11, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "falcon", "bloom", "gpt2"])
def test_what_stands_for_other_stages_returns_what_they_would(kind: str) -> None:
    """A block of Falcon and Bloom returns a tuple; GPT-2 looks positions up on each stage."""
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY)).eval()
    first, last = copy.deepcopy(whole), copy.deepcopy(whole)
    keep_layers(first, range(1))
    keep_layers(last, range(1, 2))
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    parts = [
        Stage(one, first=one is first, last=False, dtype=torch.float32, beat=lambda: None)
        for one in (first, last)
    ]
    batch = micro_batch(ids, ids)
    for part in parts:
        part.batches = [(batch, batch)]
    with torch.no_grad():
        expected = whole.base_model(ids, use_cache=False).last_hidden_state
        hidden = parts[1]._forward(parts[0]._forward(ids))
    torch.testing.assert_close(hidden, expected, rtol=0, atol=0)


def test_a_model_without_one_list_of_blocks_is_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("opt", **TINY))
    with pytest.raises(StageError, match="a opt has no one list of blocks"):
        layer_list(model)
