"""Which runs can be talked to, without a model being loaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.contracts.export import EXPORT_MANIFEST
from pipeline.errors import UsageError
from pipeline.execution.journal import Journal
from pipeline.execution.talk import Opener, Subject, can_talk, found
from pipeline.testing import context

RECIPE = """name: tiny
stages:
  model: {use: model.hf, config: {model_type: llama}}
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def exported(run: Path, writer: str, *files: str) -> Path:
    folder = run / "export"
    folder.mkdir()
    (folder / EXPORT_MANIFEST).write_text(json.dumps({"writer": writer}))
    for name in files:
        (folder / name).touch()
    return folder


def trained(run: Path, **lineage: Any) -> None:
    (run / "checkpoints.at").write_text("checkpoints\n")
    journal = Journal(run / "journal.jsonl")
    record = {"progress": {"lineage": lineage}}
    journal.write("slot finished", slot="train", digest="", record=record)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["config.json", "tokenizer_config.json"], True),
        (["config.json"], False),
        (["adapter_config.json"], True),
    ],
)
def test_an_export_talks_with_its_tokenizer(run: Path, files: list[str], *, expected: bool) -> None:
    exported(run, "export.safetensors", *files)
    assert can_talk(run) is expected


def test_a_checkpoint_talks_with_the_tokenizer_of_its_data(run: Path) -> None:
    assert not can_talk(run)
    trained(run, tokenizer="digest")
    assert can_talk(run)
    trained(run, tokenizer=None)
    assert not can_talk(run)


def test_an_export_in_another_layout_is_left_to_its_stage(run: Path) -> None:
    """A stage of a package that has been uninstalled, whose folder only that stage reads."""
    folder = exported(run, "export.npz", "weights.npz")
    assert not can_talk(run)
    trained(run, tokenizer="digest")
    assert can_talk(run)
    with pytest.raises(
        UsageError, match=r"export\.npz, which wrote it, does not open it \(name its"
    ):
        found(str(folder), None)


def test_a_recipe_that_lacks_what_is_read(run: Path, tmp_path: Path) -> None:
    opener = Opener(Subject(run=run), context(tmp_path / "scratch"))
    last = SimpleNamespace(slot="export", inputs={}, gives=None, stage=None)
    vars(opener)["_plan"] = SimpleNamespace(slots=(last,))
    with pytest.raises(UsageError, match="no slot of the run's recipe returns Weights"):
        opener.trained()
