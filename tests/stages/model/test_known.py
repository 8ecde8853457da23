"""Stored configs of well-known models equal their files."""

from __future__ import annotations

import pytest
import torch

from stages.model.assets import config_of_recipe
from stages.model.read import known_config
from tests.support.tier import spread

KNOWN = {
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/Phi-3-medium-4k-instruct": 13_960_238_080,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "google/gemma-2-2b-it": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b-pt": 999_885_952,
    "allenai/OLMo-2-0425-1B-Instruct": 1_484_916_736,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/OLMo-2-1124-13B": 13_716_198_400,
    "allenai/OLMo-2-0325-32B": 32_234_279_936,
    "ibm-granite/granite-3.1-2b-base": 2_533_531_648,
    "ibm-granite/granite-3.1-8b-instruct": 8_170_848_256,
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-medium": 354_823_168,
    "openai-community/gpt2-large": 774_030_080,
    "openai-community/gpt2-xl": 1_557_611_200,
    "EleutherAI/pythia-160m": 162_322_944,
    "EleutherAI/pythia-1b": 1_011_781_632,
    "EleutherAI/pythia-6.9b": 6_857_302_016,
    "EleutherAI/pythia-12b": 11_846_072_320,
    "EleutherAI/gpt-neox-20b": 20_554_567_680,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
}
"""Number of parameters in the files, by hub id."""


@pytest.mark.parametrize("repo", spread(list(KNOWN), 6))
def test_well_known_models_have_the_known_number_of_parameters(repo: str) -> None:
    from transformers import AutoModelForCausalLM

    config = known_config(repo)
    assert config is not None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of_recipe(config))
    model.tie_weights()
    assert sum(one.numel() for one in model.parameters()) == KNOWN[repo]
