"""Tokenizers and what else is next to the weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.errors import StageError
from stages.model.hf import HfModel
from tests.support.model_folders import configured, opened, saved
from tests.support.models import context, random_source, save_tokenizer, tiny_llama_config


def test_tokenizer_and_assets(tmp_path: Path) -> None:
    saved(tmp_path / "in")
    configured(tmp_path / "in", use_cache=True)
    save_tokenizer(tmp_path / "in")
    out = tmp_path / "out"
    out.mkdir()
    source = opened(tmp_path / "in")
    assert source.tokenizer()("a b")["input_ids"] == [3, 4]
    source.save_assets(out, dtype="bf16")
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["use_cache"] is True
    assert (out / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert (out / "generation_config.json").is_file()
    assert (out / "tokenizer.json").is_file()
    for file in out.iterdir():
        assert str(tmp_path) not in file.read_text()


def test_a_tokenizer_from_elsewhere_or_none(tmp_path: Path) -> None:
    source = random_source(tiny_llama_config(), tmp_path)
    with pytest.raises(StageError, match=r"comes without a tokenizer.*set `tokenizer`"):
        source.tokenizer()
    source.save_assets(tmp_path, dtype="fp32")
    assert not list(tmp_path.glob("tokenizer*"))
    save_tokenizer(tmp_path)
    stage = HfModel(config=tiny_llama_config(), tokenizer=str(tmp_path))
    assert stage.run(context(tmp_path)).tokenizer()("b a")["input_ids"] == [4, 3]
