"""Experts in one tensor get no low-rank update, and this is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cli import main

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 500, "intermediate_size": 96, "head_dim": 16,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {"num_experts": 16, "moe_intermediate_size": 32, "tie_word_embeddings": True},
}
LLAMA = {"model_type": "llama", **SIZES}


def config(kind: str) -> dict[str, Any]:
    return {"model_type": kind, **SIZES, **CONFIGS[kind]}


@pytest.mark.parametrize(
    ("said", "settings", "warns"),
    [
        (config("mixtral"), {}, True),
        (config("qwen3_moe"), {}, True),
        (config("mixtral"), {"targets": ["q_proj"]}, False),
        (config("mixtral"), {"train_also": ["*.experts.*"]}, False),
        (config("mixtral"), {"train_also": ["*norm.weight"]}, True),
        (LLAMA, {}, False),
    ],
)
def test_check_warns_of_experts_without_updates(
    said: dict[str, Any], settings: dict[str, Any], warns: bool, tmp_path: Path
) -> None:
    stages = {
        "model": {"use": "model.hf", "config": said},
        "adapter": {"use": "adapter.lora", **settings},
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps({"name": "r", "stages": stages}))
    result = CliRunner().invoke(main, ["check", str(file)])
    assert result.exit_code == 0, result.output
    warning = "adapter.targets: all-linear leaves out experts that are one tensor"
    assert (warning in result.stderr) == warns
