"""Inputs of `pipe export` and `pipe verify`, found without an export."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from pipeline.cli import main
from pipeline.errors import UsageError
from pipeline.execution.export_recipe import chosen, exports_of, recipe_text
from pipeline.execution.journal import Journal
from stages.export.safetensors import ExportSafetensors
from tests.support.tiny_recipe import EXPORT, training
from tests.support.tiny_store import Tiny, write


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run with a checkpoint, LoRA and two exports; the working directory is beside it."""
    folder = tmp_path / "run"
    write(Tiny(str(folder / "checkpoints")), 1)
    (folder / "checkpoints.at").write_text("checkpoints")
    stages = training(checkpoint={}, train={"steps": 1}) | EXPORT
    adapter = {"adapter": {"use": "adapter.lora", "targets": "all-linear"}}
    second = {"other": {"use": "export.safetensors", "folder": str(tmp_path / "other")}}
    stages = {"model": stages.pop("model"), **adapter, **stages, **second}
    (folder / "recipe.yaml").write_text(json.dumps({"name": "x", "stages": stages}))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return folder


@pytest.mark.parametrize("source", ["../run", "../run/checkpoints/step-00000001"])
def test_a_source_is_relative_to_where_the_command_is_given(run: Path, source: str) -> None:
    choice = chosen(source, step=None, model=None, to=Path("out"))
    assert choice.checkpoint == str(run / "checkpoints" / "step-00000001")
    assert choice.folder == run.parent / "here" / "out"
    assert choice.job.parent == run / "exports"  # where `pipe clean` sees it
    other = chosen(source, step=None, model=None, to=Path("b/out"))
    assert len({choice.job.name[:4], other.job.name[:4]}) == 1
    assert choice.job != other.job


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("r.yaml", "r.yaml is not a folder (it is a recipe: pipe run r.yaml)"),
        ("m.safetensors", "m.safetensors is not a folder (pipe run RECIPE starts a run)"),
    ],
)
def test_a_file_is_no_run(run: Path, name: str, said: str) -> None:
    Path(name).touch()
    with pytest.raises(UsageError, match=re.escape(said)):
        chosen(name, step=None, model=None, to=None)


def test_of_a_run_that_cannot_be_written(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != run)
    choice = chosen(str(run), step=None, model=None, to=Path("out"))
    assert choice.job == run.parent / "here" / "out.job"


def test_another_model_leaves_the_run_s_adapter(run: Path) -> None:
    model = run.parent / "model"
    model.mkdir()
    choice = chosen(str(run), step=None, model="../model", to=None)
    stages = yaml.safe_load(recipe_text(choice, {}, 1))["stages"]
    assert list(stages) == ["model", "adapter", "train", "consolidate", "other"]
    assert Path(stages["model"]["path"]).resolve() == model
    assert stages["train"] == {"use": "train.finished", "checkpoint": choice.checkpoint}


def test_a_run_s_exports_are_verified(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pipe(*arguments: str) -> Any:
        return CliRunner().invoke(main, ["verify", *arguments])

    monkeypatch.setattr(ExportSafetensors, "verify", lambda folder, tell, **_: tell(folder.name))
    assert f"{run / 'export'} is not there" in pipe("../run").stderr
    for folder in (run / "export", run.parent / "other"):
        folder.mkdir()
        (folder / "export.json").write_text('{"writer": "export.safetensors"}')
    assert pipe("../run").output.splitlines() == ["export", "other", "verified"]
    assert pipe("../run/export").output.splitlines() == ["export", "verified"]


def test_a_run_s_export_is_where_it_was_written(run: Path) -> None:
    """The recipe's relative path would lead elsewhere from here."""
    stages = json.loads((run / "recipe.yaml").read_text())["stages"]
    stages["other"]["folder"] = "out/model"
    (run / "recipe.yaml").write_text(json.dumps({"name": "x", "stages": stages}))
    record = {"folder": str(run.parent / "real"), "files": [], "total_bytes": 0}
    Journal(run / "journal.jsonl").write("slot finished", slot="other", digest="", record=record)
    assert exports_of(run) == [run / "export", run.parent / "real"]
    stages["export"]["folder"] = "~/model"
    (run / "recipe.yaml").write_text(json.dumps({"name": "x", "stages": stages}))
    assert exports_of(run)[0] == Path.home() / "model"
