"""No pickle is read unless the user says so, and then nothing in it is run."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from pipeline.cli import main
from pipeline.errors import CheckpointError, UsageError
from pipeline.utils.foreign import TRUST_CODE, TRUST_PICKLE
from stages.formats.dcp_compat import read_metadata
from stages.formats.stored import load
from tests.support.damage import Bomb
from tests.support.runs import TINY

WHY = "is a pickle, a format that can run code when it is read (--trust-pickle reads it"


@pytest.fixture
def untrusted(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (TRUST_PICKLE, TRUST_CODE):
        monkeypatch.setenv(variable, "0")  # restored afterwards, also where a command sets it


@pytest.mark.usefixtures("untrusted")
def test_readers_refuse_a_pickle(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(UsageError) as caught:
        load(tmp_path / "a.pt")
    assert f"{tmp_path}/a.pt {WHY}" in str(caught.value)
    (tmp_path / ".metadata").write_bytes(pickle.dumps({}))
    with pytest.raises(UsageError, match="--trust-pickle"):
        read_metadata(tmp_path)


def test_trusted_pickles_run_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    torch.save(Bomb(mark), tmp_path / "a.pt")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Bomb(mark)))
    for read, place in ((load, tmp_path / "a.pt"), (read_metadata, tmp_path)):
        with pytest.raises(CheckpointError, match="refused"):
            read(place)
    assert not mark.exists()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a folder whose weights are in `pytorch_model.bin` alone."""
    (tmp_path / "config.json").write_text(
        json.dumps(TINY | {"architectures": ["LlamaForCausalLM"]})
    )
    torch.save({}, tmp_path / "pytorch_model.bin")
    (tmp_path / "recipe.yaml").write_text(
        "name: x\nlaunch: {device: cpu}\nstages:\n  model: {use: model.hf, path: ./}\n"
    )
    return tmp_path


def pipe(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.usefixtures("untrusted")
def test_a_recipe_with_such_a_model_is_refused_before_it_runs(model: Path) -> None:
    recipe = str(model / "recipe.yaml")
    for command in ("check", "run"):
        result = pipe(command, recipe)
        assert result.exit_code == 2, result.output
        assert f"recipe.yaml:4:32: model.path: {model}/pytorch_model.bin {WHY}" in result.stderr
    assert pipe("check", recipe, "--trust-pickle").exit_code == 0
    assert os.environ[TRUST_PICKLE] == "1"


@pytest.mark.usefixtures("untrusted")
def test_safetensors_beside_are_enough(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"")
    assert pipe("check", str(model / "recipe.yaml")).exit_code == 0


@pytest.mark.usefixtures("untrusted")
def test_a_recipe_cannot_run_code_by_itself(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"")
    command = ("check", str(model / "recipe.yaml"), "model.trust_remote_code=true")
    result = pipe(*command)
    assert result.exit_code == 2
    said = f"model.trust_remote_code: code of {model} itself would run (--trust-remote-code allows"
    assert said in result.stderr.replace("/./", "/").replace("./", str(model)), result.stderr
    assert pipe(*command, "--trust-remote-code").exit_code == 0


@pytest.mark.usefixtures("untrusted")
def test_a_foreign_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    command = ("convert", str(folder), str(tmp_path / "out"), "--to", "canonical")
    result = pipe(*command)
    assert result.exit_code == 2
    assert WHY in result.stderr
    trusted = pipe(*command, "--trust-pickle")
    assert trusted.exit_code == 1, trusted.stderr
    assert "refused" in trusted.stderr
    assert not (tmp_path / "ran").exists()
