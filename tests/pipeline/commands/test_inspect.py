"""`pipe inspect`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import main
from tests.support.damage import flip
from tests.support.tiny_store import Tiny, write

OLD, NEW = "step-00000001", "step-00000002"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with two checkpoints."""
    folder = tmp_path / "run"
    tiny = Tiny(str(folder / "checkpoints"))
    write(tiny, 1, loss=2.5)
    write(tiny, 2)
    (folder / "recipe.yaml").write_text("name: x\n")
    return folder


def inspect(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)])


def test_a_checkpoint(run: Path) -> None:
    folder = run / "checkpoints" / OLD
    result = inspect(folder, "--verify")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    written = lines.pop(2)
    assert written.startswith("written     20")
    assert lines == [
        f"checkpoint  {folder}",
        "step        1",
        "by          2 processes",
        "engine      strategy tiny",
        "packages    torch 2.0",
        "metrics     eval_loss 2.5",
        "weight      2 tensors  9,150 elements  36.6 KB  F32",
        "exp_avg     1 tensor  9,000 elements  18.0 KB  BF16",
        "random      2 tensors  154 elements  154 B  U8",
        "alias       head is a",
        "group 0     2 tensors  lr 0.1  betas [0.9, 0.99]",
        "loss scale  scale 1024.0  good_steps 1",
        "file        rank-00000.safetensors  23.2 KB",
        "file        rank-00001.safetensors  39.8 KB",
        "in all      62.9 KB",
        "verified    every byte is correct",
    ]


def test_a_run_and_the_folder_of_its_checkpoints(run: Path) -> None:
    for place in (run, run / "checkpoints"):
        result = inspect(place)
        assert result.exit_code == 0, result.output
        lines = result.stdout.splitlines()
        assert [line.split()[0] for line in lines[:2]] == [OLD, NEW]
        shown = [line.partition("+00:00  ")[2].strip() for line in lines[:2]]
        assert shown == ["62.9 KB  eval_loss 2.5000  best", "62.9 KB"]
        assert lines[3:5] == [f"checkpoint  {run / 'checkpoints' / NEW}", "step        2"]
        assert lines[-1] == "verified    files and sizes only (--verify)"


def test_json(run: Path) -> None:
    told = json.loads(inspect(run, "--json").stdout)
    assert told["checkpoint"]["step"] == 2
    assert told["checkpoint"]["groups"] == [
        {"settings": {"lr": 0.1, "betas": [0.9, 0.99]}, "parameters": ["a", "b"]}
    ]
    assert told["checkpoint"]["tensors"][1] == {
        "kind": "exp_avg", "tensors": 1, "elements": 9000, "bytes": 18000, "dtypes": ["BF16"]
    }  # fmt: skip
    assert (told["verified"], told["damage"]) == (None, None)
    assert [(line["name"], line["bytes"], line["damage"]) for line in told["all"]] == [
        (OLD, 62946, None),
        (NEW, 62946, None),
    ]
    assert told["aside"] == []
    alone = json.loads(inspect(run / "checkpoints" / OLD, "--json", "--verify").stdout)
    assert alone["checkpoint"]["progress"] == {"step": 1, "metrics": {"eval_loss": 2.5}}
    assert alone["verified"] is True
    assert "all" not in alone


def test_damage_is_found_by_reading(run: Path) -> None:
    file = run / "checkpoints" / NEW / "rank-00001.safetensors"
    flip(file)
    assert inspect(run).exit_code == 0
    result = inspect(run, "--verify")
    assert result.exit_code == 1
    damage = f"{file} (random/00001/torch): damaged near byte 39692"
    assert result.stderr == f"error: {damage}\n"
    assert "verified" not in result.stdout
    told = json.loads(inspect(run, "--verify", "--json").stdout)
    assert (told["verified"], told["damage"]) == (False, damage)
    assert told["checkpoint"]["step"] == 2


def test_damage_that_needs_no_reading(run: Path) -> None:
    missing = run / "checkpoints" / OLD / "rank-00000.sums"
    missing.unlink()
    flip(run / "checkpoints" / NEW / "manifest.json")
    result = inspect(run)
    assert result.exit_code == 1
    damage = f"{run / 'checkpoints' / NEW / 'manifest.json'}: its checksum is wrong"
    assert result.stderr.startswith(f"error: {damage}")
    assert f"{missing}: missing" in result.stdout.splitlines()[0]
    told = json.loads(inspect(run, "--json").stdout)
    assert told["checkpoint"] is None
    assert told["verified"] is False
    assert told["damage"].startswith(damage)
    (run / "checkpoints" / NEW).rename(run / "checkpoints" / f"{NEW}.damaged-1")
    lines = inspect(run).stdout.splitlines()
    assert lines[1] == f"{run / 'checkpoints' / NEW}.damaged-1  damaged, kept aside"


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    result = inspect(tmp_path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {tmp_path} holds no checkpoint (give the folder of ")
    assert result.stderr.endswith("pipe convert reads other formats)\n")
    (tmp_path / OLD).mkdir()
    (tmp_path / OLD / "progress.json").touch()
    result = inspect(tmp_path / OLD)
    assert result.exit_code == 1
    assert result.stderr == f"error: {tmp_path / OLD}: no checkpoint: it holds no manifest.json\n"
    result = inspect(tmp_path / "nowhere")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {tmp_path / 'nowhere'} is not there (")


def test_an_address(run: Path) -> None:
    """A local store has another layout than an object store, but a checkpoint reads the same."""
    address = f"file://{run}/checkpoints/{OLD}"
    assert inspect(address, "--verify").stdout.splitlines()[0] == f"checkpoint  {address}"


def test_no_torch_is_needed(run: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from pipeline.cli import main; main()"
    command = [sys.executable, "-c", code, "inspect", str(run), "--verify"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
