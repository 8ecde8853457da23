"""Files of a folder, damaged and missing ones, and those of the hub (without a network)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from pipeline.errors import StageError
from stages.model.hf import HfModel
from tests.support.model_folders import HEAD, opened, refused, saved
from tests.support.models import FAMILIES, context, filled, logits, random_source

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *(
            (json.dumps({"metadata": {}, "weight_map": {HEAD: name}}), "points outside its folder")
            for name in ("../model.safetensors", "/tmp/model.safetensors", "")
        ),
        ("{", "cannot be read"),
        ("[]", "not a JSON object"),
        ('{"weight_map": 3}', "is damaged"),
        ('{"weight_map": {"a": 1}}', "is missing"),
    ],
)
def test_a_damaged_index(text: str, said: str, tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / INDEX).write_text(text)
    assert said in refused(tmp_path)


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    saved(tmp_path, max_shard_size="30KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    assert "cannot be read as safetensors" in refused(tmp_path)
    shard.unlink()
    assert f"a weight file is missing: {shard}" in refused(tmp_path)
    (tmp_path / INDEX).unlink()
    assert "no weights in" in refused(tmp_path)


def test_other_weights_of_a_folder(tmp_path: Path) -> None:
    model = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    random = opened(tmp_path, init="random")
    assert torch.equal(logits(filled(random)), logits(model))  # same seed, same architecture
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert torch.equal(logits(filled(opened(tmp_path))), logits(model))


def test_gguf_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.gguf").touch()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(StageError, match=r"pip install 'pipetrain\[gguf\]'"):
        opened(tmp_path / "x.gguf")


COMMIT = "0123456789abcdef0123456789abcdef01234567"


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

    def model(self, **fields: Any) -> Any:
        stage = HfModel(path="owner/name", revision=COMMIT, **fields)
        return stage.run(context(self.folder))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def test_hub_model(hub: Hub) -> None:
    model = saved(hub.folder)
    source = hub.model()
    assert torch.equal(logits(filled(source)), logits(model))
    assert source.name == "owner/name"
    assert [call[:2] for call in hub.calls] == [("owner/name", COMMIT)]
    assert "*.safetensors" in hub.calls[0][2]
    assert "*.bin" not in hub.calls[0][2]


def test_an_adapter_next_to_the_weights_of_a_hub_model(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    saved(hub.folder)
    (hub.folder / INDEX).write_text("{}")
    hub.model()
    assert "model.safetensors is read" in caplog.text
    (hub.folder / "adapter_config.json").write_text("{}")
    with pytest.raises(StageError, match=r"owner/name: .*the adapter next to the weights is not"):
        hub.model()
    hub.calls.clear()
    hub.model(init="random")
    assert not {"*.safetensors", "pytorch_model*.bin"} & set(hub.calls[0][2])


def test_hub_model_with_torch_files_only(hub: Hub) -> None:
    filled(random_source(FAMILIES["llama"], hub.folder)).config.save_pretrained(hub.folder)
    hub.model()
    assert "pytorch_model*.bin" in hub.calls[1][2]


def test_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(StageError, match=r"cannot get owner/name .* no route to host"):
        hub.model()
