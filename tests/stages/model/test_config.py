"""Configs written in the recipe, and the hub (without a network)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from pipeline.errors import StageError
from stages.model.hf import HfModel
from tests.support.models import FAMILIES, context, filled, logits, random_source, tiny_llama_config

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            tiny_llama_config(hiden_size=3),
            "a llama config has no key 'hiden_size' (did you mean hidden_size?)",
        ),
        (tiny_llama_config(qqqq=3), "a llama config has no key 'qqqq'"),
        (tiny_llama_config(hidden_size="x"), "the model's config cannot be used: "),
        (tiny_llama_config(model_type="lama"), "the model's config cannot be used: "),
    ],
)
def test_unusable_config(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(StageError) as error:
        random_source(config, tmp_path)
    assert str(error.value).startswith(message)


def test_architecture_that_is_no_causal_language_model(tmp_path: Path) -> None:
    source = random_source({"model_type": "vit"}, tmp_path)
    with pytest.raises(StageError, match="cannot be built"):
        source.build()


def test_rope_theta_in_its_old_spelling(tmp_path: Path) -> None:
    new, old = tiny_llama_config(), tiny_llama_config(rope_theta=55.0)
    table = random_source(old, tmp_path).build().get_buffer("model.rotary_emb.inv_freq")
    assert table[1].item() == pytest.approx(55.0 ** (-2 / 6))
    assert random_source(new, tmp_path).build().get_buffer("model.rotary_emb.inv_freq")[
        1
    ].item() == pytest.approx(10000.0 ** (-2 / 6))


class Hub:
    """Replaces the hub: a snapshot is a local folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[tuple[str, str | None, list[str]]] = []

    def snapshot_download(
        self, repo: str, *, revision: str | None, allow_patterns: list[str]
    ) -> str:
        self.calls.append((repo, revision, allow_patterns))
        return str(self.folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def test_hub_model(hub: Hub, tmp_path: Path) -> None:
    model = filled(random_source(FAMILIES["llama"], tmp_path))
    model.save_pretrained(hub.folder)
    source = HfModel(path="owner/name", revision=COMMIT).run(context(tmp_path))
    assert torch.equal(logits(filled(source)), logits(model))
    assert source.name == "owner/name"
    assert [call[:2] for call in hub.calls] == [("owner/name", COMMIT)]
    assert "*.safetensors" in hub.calls[0][2]
    assert "*.bin" not in hub.calls[0][2]


def test_an_adapter_beside_the_weights_of_a_hub_model(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(random_source(FAMILIES["llama"], tmp_path)).save_pretrained(hub.folder)
    (hub.folder / "model.safetensors.index.json").write_text("{}")
    model = HfModel(path="owner/name", revision=COMMIT)
    model.run(context(tmp_path))
    assert "model.safetensors is read" in caplog.text
    (hub.folder / "adapter_config.json").write_text("{}")
    with pytest.raises(StageError, match=r"owner/name: .*the adapter next to the weights is not"):
        model.run(context(tmp_path))
    HfModel(path="owner/name", revision=COMMIT, init="random").run(context(tmp_path))


def test_hub_model_with_random_weights_downloads_none(hub: Hub, tmp_path: Path) -> None:
    filled(random_source(FAMILIES["llama"], tmp_path)).save_pretrained(hub.folder)
    HfModel(path="owner/name", revision=COMMIT, init="random").run(context(tmp_path))
    assert not {"*.safetensors", "pytorch_model*.bin"} & set(hub.calls[0][2])


def test_hub_model_with_torch_files_only(hub: Hub, tmp_path: Path) -> None:
    filled(random_source(FAMILIES["llama"], tmp_path)).config.save_pretrained(hub.folder)
    HfModel(path="owner/name", revision=COMMIT).run(context(tmp_path))
    assert "pytorch_model*.bin" in hub.calls[1][2]


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(StageError, match=r"cannot get owner/name .* no route to host"):
        HfModel(path="owner/name", revision=COMMIT).run(context(tmp_path))
