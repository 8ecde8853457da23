"""Samples that are longer than the model's positions are reported before a start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import main
from stages.model.compat import causal_types
from stages.model.config_checks import stated_context

GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 50}
LLAMA = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}
YARN = {"factor": 2.0, "rope_type": "yarn"}


def checked(folder: Path, config: dict[str, Any], *options: str, length: int = 512) -> Result:
    """Run `pipe check` on a recipe with samples of `length` tokens."""
    (folder / "text.txt").write_text("a text")
    (folder / "tokenizer.json").touch()
    file = folder / "recipe.yaml"
    stages = {
        "model": {
            "use": "model.hf",
            "config": config,
            "tokenizer": str(folder),
            "attention": "eager",
        },
        "data": {"use": "data.text", "files": "./text.txt", "sequence_length": length},
    }
    file.write_text(json.dumps({"name": "r", "stages": stages}))
    return CliRunner().invoke(main, ["check", str(file), *options])


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({**GPT2, "n_positions": 256}, 256),
        ({**GPT2, "n_positions": 512}, None),
        (GPT2, None),  # 1024
        ({"model_type": "opt", "max_position_embeddings": 256}, 256),
    ],
)
def test_a_table_of_positions_that_is_too_short_is_a_mistake(
    config: dict[str, Any], positions: int | None, tmp_path: Path
) -> None:
    result = checked(tmp_path, config)
    assert result.exit_code == (0 if positions is None else 2), result.output
    if positions is not None:
        assert (
            f"model: samples of slot `data` may have 512 tokens, and the model has {positions} "
            f"positions (set data.sequence_length to {positions} or less)"
        ) in result.output


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        (LLAMA, 2048),
        ({"model_type": "gemma2", "hidden_size": 8, "num_attention_heads": 2}, 8192),
        ({"model_type": "qwen3", "hidden_size": 8, "num_attention_heads": 2}, 32768),
        ({"model_type": "mamba", "hidden_size": 8}, None),
    ],
)
def test_positions_that_the_config_leaves_to_its_type(
    config: dict[str, Any], positions: int | None, tmp_path: Path
) -> None:
    result = checked(tmp_path, config, length=10**9)
    assert result.exit_code == 0, result.output
    told = f"may have 1000000000 tokens, and the model has {positions} positions"
    assert (told in result.stderr) == (positions is not None)
    if positions is not None:
        assert "positions" not in checked(tmp_path, config, length=positions).stderr


def test_defaults_are_those_of_transformers() -> None:
    from transformers import CONFIG_MAPPING

    known = 0
    for kind in causal_types():
        stated = stated_context({"model_type": kind})
        try:
            config = CONFIG_MAPPING[kind]().get_text_config()
        except Exception:  # of a type that refuses its own default, or has several texts
            continue
        live = getattr(config, "max_position_embeddings", getattr(config, "n_positions", None))
        if stated is not None and config.model_type == kind:
            scaled = stated_context(config.to_dict())
            assert stated in (live, scaled), kind
            known += 1
    assert known > 100


@pytest.mark.parametrize(
    ("fields", "positions"),
    [
        ({}, None),
        ({"max_position_embeddings": 512}, None),
        ({"max_position_embeddings": 511}, 511),
        ({"max_position_embeddings": 256, "rope_scaling": YARN}, None),
    ],
)
def test_rotary_positions_beyond_those_of_the_config_are_a_warning(
    fields: dict[str, Any], positions: int | None, tmp_path: Path
) -> None:
    result = checked(tmp_path, {**LLAMA, **fields})
    assert result.exit_code == 0, result.output
    told = f"may have 512 tokens, and the model has {positions} positions"
    assert (told in result.stderr) == (positions is not None)
    record = json.loads(checked(tmp_path, {**LLAMA, **fields}, "--json").stdout)
    assert (record["ok"], len(record["warnings"])) == (True, int(positions is not None))
