"""The target folder: only the files of our own export are ever replaced."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import ExportError, StageError
from pipeline.testing import plan_view
from stages.export import contents
from stages.export.proof import verify
from stages.export.safetensors import ExportAdapter, ExportSafetensors
from tests.support.exports import Run, stored


def test_foreign_files_are_left_alone(llama: Run, tmp_path: Path) -> None:
    llama.folder.mkdir()
    (llama.folder / "thesis.tex").write_text("x")
    with pytest.raises(StageError, match="holds other files than an export by pipe"):
        llama.export()
    assert (llama.folder / "thesis.tex").read_text() == "x"
    problems = list(ExportSafetensors(folder=str(llama.folder)).check(plan_view()))
    assert [problem.key for problem in problems] == ["folder"]


def test_an_export_that_ended_before_its_first_file_goes_on(llama: Run) -> None:
    partial = llama.folder.with_name(f"{llama.folder.name}.partial")
    partial.mkdir()
    (partial / "export.json.tmp").write_text("{")
    llama.export()
    assert not partial.exists()
    assert not (llama.folder / "export.json.tmp").exists()


def test_file_added_to_an_export_is_left_alone(exported: Run) -> None:
    (exported.folder / "eval.json").write_text("{}")
    with pytest.raises(StageError, match=r"added after its export: eval.json"):
        exported.export()
    assert (exported.folder / "eval.json").is_file()


def test_earlier_export_is_replaced_only_by_a_proven_one(
    llama: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama.export(dtype="fp32", max_shard_size="20KB")
    before = stored(llama.folder)
    llama.weights.tensors["model.norm.weight"] += 1

    def fail(*args: Any) -> None:
        raise ExportError("no")

    with monkeypatch.context() as patch:
        patch.setattr(contents.ModelContents, "prove", fail)
        with pytest.raises(ExportError):
            llama.export(dtype="fp32")
    assert torch.equal(stored(llama.folder)["model.norm.weight"], before["model.norm.weight"])
    llama.export(dtype="fp32")
    after = stored(llama.folder)["model.norm.weight"]
    assert torch.equal(after, before["model.norm.weight"] + 1)
    assert not list(llama.folder.glob("model-*"))
    assert [entry.name for entry in llama.folder.parent.iterdir()] == ["export"]


def test_crash_between_the_renames_is_healed(exported: Run) -> None:
    previous = exported.folder.with_name(".export.previous")
    shutil.move(exported.folder, previous)
    exported.export(dtype="fp32")
    assert exported.folder.is_dir()
    assert not previous.exists()


def test_write_error(llama: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pipeline.utils.files.os.fsync", fail)
    with pytest.raises(StageError, match=r"cannot write the export .* No space left"):
        llama.export()


@pytest.mark.parametrize("name", ["README.md", "generation_config.json", "config.json"])
def test_an_earlier_export_with_a_changed_file_is_kept_aside(
    name: str, exported: Run, caplog: pytest.LogCaptureFixture
) -> None:
    llama = exported
    (llama.folder / name).write_text("mine")
    (problem,) = ExportSafetensors(folder=str(llama.folder)).check(plan_view())
    assert problem.warning
    assert f"changed after it was written: {name}" in problem.message
    llama.export(dtype="bf16")
    aside = llama.folder.with_name("export.changed-1")
    assert (aside / name).read_text() == "mine"
    assert f"changed after it was written: {name}; it is kept as {aside}" in caplog.text
    assert (llama.folder / name).read_text() != "mine"
    assert len(list(llama.folder.parent.iterdir())) == 2


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def huge(file: Path) -> None:
    os.truncate(file, 1 << 32)


def elsewhere(file: Path) -> None:
    file.write_text(file.read_text().replace('"config.json"', '"../config.json"'))


@pytest.mark.parametrize(
    "damage", [fifo, folder, huge, elsewhere, lambda file: file.write_text("[" * 100_000)]
)
def test_an_export_whose_manifest_is_damaged_is_made_anew(
    damage: Callable[[Path], object], exported: Run
) -> None:
    damage(exported.folder / "export.json")
    exported.export(dtype="fp32")
    assert (exported.folder.with_name("export.changed-1") / "config.json").is_file()
    verify(exported.folder, print, trust_remote_code=False)


def test_two_slots_do_not_export_to_one_folder() -> None:
    one, other = ExportSafetensors(), ExportSafetensors(folder="else", dtype="fp32")
    last = ExportAdapter()
    plan = plan_view({"early": one, "other": other, "last": last})
    assert [*one.check(plan), *other.check(plan)] == []
    (problem,) = last.check(plan)
    assert (problem.key, problem.hint) == ("folder", "name another folder")
    assert problem.message == (
        "slot `early` exports to the run's folder `export` too, and would be replaced"
    )
