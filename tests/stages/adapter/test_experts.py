"""Experts that are one tensor get no low-rank update, which is reported."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cli import main
from stages.adapter.experts import expert_share
from stages.adapter.lora import Lora
from stages.model.declared import outline
from stages.model.hf import HfModel
from tests.support.models import context

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


@pytest.mark.parametrize("kind", CONFIGS)
def test_most_of_a_model_can_be_experts(kind: str, tmp_path: Path) -> None:
    module = outline(HfModel(config=config(kind), init="random").run(context(tmp_path)))
    sizes = {name: one.numel() for name, one in module.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert expert_share(module) == experts / sum(sizes.values()) > 0.5
    assert expert_share(module, [name for name in sizes if ".experts." in name]) == 0


def test_a_model_without_experts_has_no_share(tmp_path: Path) -> None:
    module = outline(HfModel(config=LLAMA, init="random").run(context(tmp_path)))
    assert expert_share(module) == 0


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


def test_a_run_warns_of_them_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ctx = context(tmp_path)
    model = HfModel(config=config("mixtral"), init="random").run(ctx)
    share = f"{expert_share(outline(model)):.0%}".replace("%", " %")
    with caplog.at_level(logging.WARNING, ctx.log.name):
        Lora().run(ctx, model)
    (record,) = [one for one in caplog.records if "experts" in one.getMessage()]
    assert record.getMessage().startswith(f"{share} of the model's parameters are experts")


def test_experts_that_are_trained_as_a_whole_are_not_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ctx = context(tmp_path)
    model = HfModel(config=config("mixtral"), init="random").run(ctx)
    with caplog.at_level(logging.WARNING, ctx.log.name):
        Lora(train_also=("*.experts.*",)).run(ctx, model)
    assert not [one for one in caplog.records if "experts" in one.getMessage()]
