"""Models from a recipe's config, and from code in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, dynamic_module_utils

from pipeline.errors import StageError, UsageError
from pipeline.utils.foreign import TRUST_CODE
from stages.export.safetensors import ExportSafetensors
from stages.model.hf import HfModel
from tests.support.model_folders import configured, opened, saved
from tests.support.models import FAMILIES, context, filled, logits, random_source, tiny_llama_config
from tests.support.weights import trained as changed


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hiden_size": 3}, "a llama config has no key 'hiden_size' (did you mean hidden_size?)"),
        ({"qqqq": 3}, "a llama config has no key 'qqqq'"),
        ({"hidden_size": "x"}, "the model's config cannot be used: "),
        ({"model_type": "lama"}, "the model's config cannot be used: "),
    ],
)
def test_unusable_config(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(StageError) as error:
        random_source(tiny_llama_config(**config), tmp_path)
    assert str(error.value).startswith(message)


def test_a_model_that_cannot_be_built(tmp_path: Path) -> None:
    for config, attention in (({"model_type": "vit"}, "sdpa"), (FAMILIES["llama"], "nonsense")):
        source = HfModel(config=config, attention=attention).run(context(tmp_path))
        with pytest.raises(StageError, match="cannot be built"):
            source.build()


def test_rope_theta_in_its_old_spelling(tmp_path: Path) -> None:
    for fields, theta in (({}, 10000.0), ({"rope_theta": 55.0}, 55.0)):
        model = random_source(tiny_llama_config(**fields), tmp_path).build()
        table = model.get_buffer("model.rotary_emb.inv_freq")
        assert table[1].item() == pytest.approx(theta ** (-2 / 6))


def test_config_from_a_file(tmp_path: Path) -> None:
    saved(tmp_path)
    source = HfModel(config=str(tmp_path / "config.json")).run(context(tmp_path, seed=4))
    twin = random_source(FAMILIES["llama"], tmp_path, seed=4)
    assert torch.equal(logits(filled(source)), logits(filled(twin)))


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class MineConfig(LlamaConfig):
    model_type = "mine"

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a Llama under another name, with its class in a file next to it."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    saved(tmp_path / "mine", "llama_tied")
    (tmp_path / "mine/code_mine.py").write_text(CODE)
    auto_map = {
        "AutoConfig": "code_mine.MineConfig",
        "AutoModelForCausalLM": "code_mine.MineForCausalLM",
    }
    configured(tmp_path / "mine", model_type="mine", auto_map=auto_map)
    return tmp_path / "mine"


def test_code_is_not_run_unasked(mine: Path, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="contains custom code"):
        opened(mine)
    assert not (tmp_path / "modules").exists() or not list((tmp_path / "modules").glob("*/mine*"))


@pytest.mark.parametrize("fields", [{"trust_remote_code": True}, {"attention": "a/kernel"}])
def test_a_recipe_alone_does_not_allow_code(
    fields: dict[str, Any], mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TRUST_CODE, raising=False)
    with pytest.raises(UsageError, match=r"would run \(--trust-remote-code allows it"):
        opened(mine, **fields)
    assert not (tmp_path / "modules").exists()


def test_code_is_exported(mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRUST_CODE, "1")
    source = opened(mine, trust_remote_code=True)
    weights = changed(source)
    done = ExportSafetensors(dtype="fp32").run(context(tmp_path), weights, source)
    assert "code_mine.py" in done.files
    loaded = AutoModelForCausalLM.from_pretrained(done.folder, trust_remote_code=True)
    assert type(loaded).__name__ == "MineForCausalLM"
    assert torch.equal(logits(loaded.eval()), logits(filled(source, weights)))
