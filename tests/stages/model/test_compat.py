"""Facts that the source of each type states are those of its classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from stages.model.compat import (
    attentions,
    causal_types,
    image_text_types,
    suited_attention,
    tied_names,
    ties_by_default,
)
from stages.model.config_checks import stated_context
from tests.support.models import FAMILIES
from tests.support.tier import spread


def test_the_table_of_architectures_is_transformers_own() -> None:
    from transformers.models.auto import modeling_auto as tables

    assert causal_types() == tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert image_text_types() == tables.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def test_defaults_are_those_of_transformers() -> None:
    ties, positions = 0, 0
    for kind in causal_types():
        try:
            config = CONFIG_MAPPING[kind]().get_text_config()
        except Exception:  # of a type that refuses its own default, or has several texts
            continue
        tied, live = ties_by_default(kind), getattr(config, "tie_word_embeddings", None)
        if None not in (tied, live) and kind != "moss_transcribe_diarize":  # its parts differ
            assert tied == live, kind
            ties += 1
        stated = stated_context({"model_type": kind})
        live = getattr(config, "max_position_embeddings", getattr(config, "n_positions", None))
        if stated is not None and config.model_type == kind:
            assert stated in (live, stated_context(config.to_dict())), kind
            positions += 1
    assert min(ties, positions) > 100


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_tied_names_are_those_of_the_class(family: str) -> None:
    kind = FAMILIES[family]["model_type"]
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**FAMILIES[family]))
    assert {tied_names(kind)} == set(model._tied_weights_keys.items())


@pytest.mark.parametrize("kind", spread(sorted(causal_types()), 24))
def test_attentions_are_those_of_the_class(kind: str) -> None:
    known = attentions(kind)
    built = getattr(transformers, causal_types()[kind], None)
    if known and built is not None:
        assert ("sdpa" in known) is bool(built._supports_sdpa)
        if "sdpa" not in known:
            assert ("flex_attention" in known) is bool(built._supports_flex_attn)


def test_the_fastest_attention_of_a_device() -> None:
    assert suited_attention("gemma2", "cuda") == "flex_attention"
    assert suited_attention("bloom", "cuda") == "eager"
    assert suited_attention("llama", "cpu") == suited_attention("nobody", "cpu") == "sdpa"
