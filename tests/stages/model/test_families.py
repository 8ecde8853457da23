"""Families that are described as data have the weights that their modules have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import StageError
from pipeline.forecast.site import Site
from stages.adapter.lora import Lora
from stages.model.hf import HfModel
from stages.model.shapes.catalogue import FAMILIES
from stages.model.shapes.known import known_config
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
    heads = theirs.num_attention_heads
    filled = {
        "num_key_value_heads": heads,
        "layer_types": getattr(theirs, "layer_types", None),
        "rope_parameters": theirs.rope_parameters,
        "partial_rotary_factor": theirs.rope_parameters.get("partial_rotary_factor"),
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
        ("gemma3_text", {"sliding_window_pattern": 0}, "expected a whole number from 1"),
    ],
)
def test_a_config_that_no_model_can_have_is_named(
    kind: str, change: dict[str, Any], message: str
) -> None:
    config = {**fields(kind)["config"], **change}
    with pytest.raises(StageError, match=f"config of a {kind}: .*{message}"):
        HfModel(config=config, attention="eager").forecast(SITE)


def test_a_loss_in_chunks_is_refused_where_logits_are_capped() -> None:
    shape = HfModel(**fields("gemma2")).forecast(SITE)
    with pytest.raises(StageError, match="computes something with its logits"):
        Told(Fsdp(), shape, ranks=2, chunk=64)
