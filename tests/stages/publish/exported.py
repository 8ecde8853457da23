"""A folder as an export leaves it, and attempts to publish it."""

from __future__ import annotations

import hashlib
import json
import traceback
from pathlib import Path
from typing import Any

import pytest

from pipeline.contracts.export import ExportedModel
from pipeline.errors import StageError
from pipeline.testing import context
from stages.publish.hub import PublishedModel, PublishHub

TOKEN = "hf_aVerySecretTokenOfThirtyFourChars"
REPO = "someone/tiny"
CARD = "---\nlibrary_name: transformers\n---\n\n# A model\n"


def write_export(folder: Path) -> ExportedModel:
    contents = {
        "README.md": CARD.encode(),
        "config.json": b"{}\n",
        "model.safetensors": bytes(range(256)) * 40,
        "additional_chat_templates/tools.jinja": b"{{ tools }}",
    }
    listed = [
        "README.md", "additional_chat_templates", "config.json", "export.json", "model.safetensors"
    ]  # fmt: skip
    contents["export.json"] = json.dumps({"files": listed}).encode()
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "notes.txt").write_text("mine")
    (folder / ".env").write_text("SECRET=1")
    return ExportedModel(folder=folder, files=listed, total_bytes=10240)


def publish(model: ExportedModel, **fields: Any) -> PublishedModel:
    stage = PublishHub(repo=REPO, **fields)
    return stage.run(context(model.folder.parent / "run"), model)


def refused(model: ExportedModel, **fields: Any) -> str:
    """The error, as it is shown with its traceback; the export is as it was before."""
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
