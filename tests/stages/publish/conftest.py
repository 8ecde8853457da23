"""An exported folder, a hub to publish it to, and attempts to publish it."""

from __future__ import annotations

import hashlib
import json
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from pipeline.contracts.export import ExportedModel
from pipeline.errors import StageError
from pipeline.testing import context
from stages.publish.hub import PublishedModel, PublishHub
from tests.stages.publish.hub_server import TOKEN, Hub, serving

REPO = "someone/tiny"
CONTENTS = {
    "README.md": b"---\nlibrary_name: transformers\n---\n\n# A model\n",
    "config.json": b"{}\n",
    "model.safetensors": bytes(range(256)) * 40,
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
}
LISTED = ["README.md", "additional_chat_templates", "config.json", "export.json",
          "model.safetensors"]  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> ExportedModel:
    """Return the folder of an export, with other files beside it."""
    folder = tmp_path / "export"
    others = {"export.json": json.dumps({"files": LISTED}).encode(), ".env": b"SECRET=1"}
    for name, content in (CONTENTS | others).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return ExportedModel(folder=folder, files=LISTED, total_bytes=10240)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Return an empty hub that huggingface_hub talks to, with the right token in the
    environment."""
    with serving() as hub:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        yield hub
    huggingface_hub.close_session()


@pytest.fixture(autouse=True)
def _nobody_is_logged_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    caplog.set_level(logging.DEBUG)


def publish(model: ExportedModel, **fields: Any) -> PublishedModel:
    stage = PublishHub(repo=REPO, **fields)
    return stage.run(context(model.folder.parent / "run"), model)


def refused(model: ExportedModel, **fields: Any) -> str:
    """Return the error as shown with its traceback; require that the export is unchanged."""
    before = snapshot(model.folder)
    with pytest.raises(StageError) as caught:
        publish(model, **fields)
    assert snapshot(model.folder) == before
    return "".join(traceback.format_exception(caught.value))


def snapshot(folder: Path) -> dict[str, tuple[str, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in files
    }
