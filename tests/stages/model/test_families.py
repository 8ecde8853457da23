"""Families that are described as data have the weights that their modules have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline.forecast.site import Site
from stages.model.shapes.catalogue import FAMILIES

from pipeline.errors import StageError
from stages.adapter.lora import Lora
from stages.model.hf import HfModel
from stages.model.known import known_config
from stages.wrap.fsdp import Fsdp
from tests.stages.model.test_shapes import module_sizes, sizes
from tests.support.families import SMALL, VARIANTS, fields
from tests.support.forecasts import Told

SITE = Site(ranks=1, local_ranks=1, device="cpu")


@pytest.mark.parametrize("name", [*SMALL, *VARIANTS])
def test_names_and_shapes_are_the_modules(name: str, tmp_path: Path) -> None:
    stage = HfModel(**fields(name))
    assert sizes(stage.forecast(SITE)) == module_sizes(stage, tmp_path)


@pytest.mark.parametrize("kind", FAMILIES)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(kind)
    rotary = getattr(theirs, "rope_parameters", None) or {}
    filled = {
        "num_key_value_heads": theirs.num_attention_heads,
        "layer_types": getattr(theirs, "layer_types", None),
        "rope_parameters": rotary,
        "rope_scaling": getattr(theirs, "rope_scaling", None),
        "partial_rotary_factor": rotary.get("partial_rotary_factor"),
        "rotary_pct": rotary.get("partial_rotary_factor"),
        "sliding_window_pattern": getattr(theirs, "_sliding_window_pattern", None),
    }
    for key, value in FAMILIES[kind].defaults.items():
        known = getattr(theirs, key) if hasattr(theirs, key) else filled[key]
        assert known == (filled[key] if value is None and key in filled else value), key


@pytest.mark.parametrize("kind", SMALL)
def test_adapters_add_what_peft_adds(kind: str, tmp_path: Path) -> None:
    stage, lora = HfModel(**fields(kind)), Lora(rank=4)
    shape = lora.forecast(SITE, stage.forecast(SITE))
    module = module_sizes(stage, tmp_path, lora)
    assert sum(weight.elements for weight in shape.weights()) == sum(
        torch.Size(size).numel() for size in module.values()
    )
    trained = sorted(weight.shape for weight in shape.weights() if weight.trained)
    assert trained == sorted(size for name, size in module.items() if "lora_" in name)


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
}
"""Hub id -> parameters, as its files have them."""


@pytest.mark.parametrize("repo", KNOWN)
def test_well_known_models_have_the_known_number_of_parameters(repo: str) -> None:
    config = known_config(repo)
    assert config is not None
    stage = HfModel(config=config, attention="eager")
    assert stage.forecast(SITE).parameters == KNOWN[repo]


def test_gemma_2_wants_eager_attention() -> None:
    config = fields("gemma2")["config"]
    with pytest.raises(StageError, match=r"a gemma2 has no attention: sdpa.*write eager"):
        HfModel(config=config).forecast(SITE)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("phi3", {"partial_rotary_factor": "half"}, "partial_rotary_factor is 'half'"),
        ("phi3", {"rope_parameters": 3}, "rope_parameters is 3, expected a table"),
        ("gemma3_text", {"layer_types": ["full_attention"]}, "expected a list of 4 of full_att"),
        ("gpt2", {"activation_function": 1}, "activation_function is 1, expected a name"),
        ("gpt2", {"resid_pdrop": -1}, "resid_pdrop is -1, expected a number from 0"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "expected a whole number from 1"),
    ],
)
def test_a_config_that_no_model_can_have_is_named(
    kind: str, change: dict[str, Any], message: str
) -> None:
    config = {**fields(kind)["config"], **change}
    with pytest.raises(StageError, match=f"config of a {kind}: .*{message}"):
        HfModel(config=config, attention="eager").forecast(SITE)


@pytest.mark.parametrize(
    ("kind", "field"),
    [("gemma3_text", "use_bidirectional_attention"), ("gpt2", "add_cross_attention")],
)
def test_what_arithmetic_does_not_know_is_refused(kind: str, field: str) -> None:
    config = {**fields(kind)["config"], field: True}
    with pytest.raises(StageError, match=f"sizes of a {kind} with {field} are not known.*--trace"):
        HfModel(config=config).forecast(SITE)


def test_a_loss_in_chunks_is_refused_where_logits_are_capped() -> None:
    shape = HfModel(**fields("gemma2")).forecast(SITE)
    with pytest.raises(StageError, match="computes something with its logits"):
        Told(Fsdp(), shape, ranks=2, chunk=64)


def test_gpt2_by_the_names_of_others() -> None:
    own = {"model_type": "gpt2", "n_embd": 128, "n_layer": 3, "n_head": 4, "n_inner": 96}
    others = {
        "model_type": "gpt2", "hidden_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "intermediate_size": 96,
    }  # fmt: skip
    first, second = (sizes(HfModel(config=one).forecast(SITE)) for one in (own, others))
    assert first == second
    assert first["transformer.h.2.mlp.c_fc.weight"] == (128, 96)
