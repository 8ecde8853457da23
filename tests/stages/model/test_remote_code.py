"""A model whose code is in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, dynamic_module_utils

from pipeline.errors import StageError, UsageError
from pipeline.utils.trust import TRUST_CODE
from stages.export.safetensors import ExportSafetensors
from stages.model.hf import HfModel
from tests.support.models import FAMILIES, context, filled, logits, random_source
from tests.support.weights import trained

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class MineConfig(LlamaConfig):
    model_type = "mine"

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a Llama under another name, with its class in a file beside it."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "mine"
    filled(random_source(FAMILIES["llama_tied"], tmp_path)).save_pretrained(folder)
    (folder / "code_mine.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text()) | {
        "model_type": "mine",
        "auto_map": {
            "AutoConfig": "code_mine.MineConfig",
            "AutoModelForCausalLM": "code_mine.MineForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_code_is_not_run_unasked(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="contains custom code"):
        HfModel(path=str(folder)).run(context(tmp_path))
    assert not (tmp_path / "modules").exists() or not list((tmp_path / "modules").glob("*/mine*"))


@pytest.mark.parametrize("fields", [{"trust_remote_code": True}, {"attention": "a/kernel"}])
def test_a_recipe_alone_does_not_allow_it(
    fields: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TRUST_CODE, raising=False)
    with pytest.raises(UsageError, match=r"would run \(--trust-remote-code allows it"):
        HfModel(path=str(folder), **fields).run(context(tmp_path))
    assert not (tmp_path / "modules").exists()


def test_round_trip(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRUST_CODE, "1")
    source = HfModel(path=str(folder), trust_remote_code=True).run(context(tmp_path))
    weights = trained(source)
    done = ExportSafetensors(dtype="fp32").run(context(tmp_path), weights, source)
    assert "code_mine.py" in done.files
    loaded = AutoModelForCausalLM.from_pretrained(done.folder, trust_remote_code=True)
    assert type(loaded).__name__ == "MineForCausalLM"
    assert torch.equal(logits(loaded.eval()), logits(filled(source, weights)))
