"""`pipe inspect` and `pipe convert`."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from pipeline.checkpoint.formats import Reading
from pipeline.cli import main
from pipeline.contracts.engine import EngineState, ParameterGroup
from pipeline.contracts.training import Progress
from stages.formats.formats import Canonical, Dcp
from stages.formats.stored import MOMENTS, MappedSource, whole
from tests.support.damage import flip
from tests.support.formats import digest_of
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


def test_a_checkpoint_is_inspected(run: Path) -> None:
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


def test_inspected_as_json(run: Path) -> None:
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


SETTINGS = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}


def source() -> MappedSource:
    kinds = {kind: torch.rand(500, 30) for kind in ("weight", "exp_avg", "exp_avg_sq")}
    return MappedSource(
        where="memory", step=4, world_size=2, writer={}, progress=vars(Progress(step=4, samples=8)),
        state=EngineState(
            aliases={"head": "w"}, frozen=[],
            groups=[ParameterGroup(settings=SETTINGS, parameters=["w"], moments=MOMENTS)],
            updates={"w": 4}, loss_scale=None,
        ),
        stored={f"{kind}/w": whole(tensor) for kind, tensor in kinds.items()},
    )  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    Canonical().write(source(), tmp_path / "step-00000004")
    return tmp_path / "step-00000004"


def convert(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["convert", *map(str, arguments)])


def test_converted_there_and_back(checkpoint: Path, tmp_path: Path) -> None:
    before = Canonical().open(checkpoint, Reading())
    for number, form in enumerate(("dcp", "deepspeed", "full")):
        result = convert(checkpoint, tmp_path / form, "--to", form)
        assert result.exit_code == 0, result.output
        there = tmp_path / form / "step-00000004" if form == "full" else tmp_path / form
        assert f"wrote {there}\n" in result.output
        assert "canonical, step 4, 3 tensors, 180.0 KB" in result.output
        result = convert(there, tmp_path / str(number), "--to", "canonical", "--samples", 9)
        assert result.exit_code == 0, result.output
        assert ("samples=9 is assumed" in result.output) == (form == "dcp")
        back = Canonical().open(tmp_path / str(number) / "step-00000004", Reading())
        assert digest_of(back) == digest_of(before)
        assert back.progress["samples"] == (9 if form == "dcp" else 8)
        assert back.state.groups == before.state.groups


def test_weights_alone(checkpoint: Path, tmp_path: Path) -> None:
    result = convert(checkpoint, tmp_path / "w", "--to", "dcp", "--weights-only")
    assert result.exit_code == 0, result.output
    found = Dcp().open(tmp_path / "w", Reading(weights_only=True))
    assert set(found.tensors) == {"weight/head", "weight/w"}
    result = convert(checkpoint, tmp_path / "d", "--to", "deepspeed", "--weights-only")
    assert result.exit_code == 1
    assert "here is no optimizer state" in result.output


def test_mistakes_of_convert(checkpoint: Path, tmp_path: Path) -> None:
    for arguments, code, message in (
        ((tmp_path / "no", tmp_path / "x", "--to", "dcp"), 2, "no: no such folder"),
        ((tmp_path, tmp_path / "x", "--to", "dcp"), 2, "no checkpoint of a known format"),
        ((checkpoint, tmp_path / "x", "--to", "dpc"), 2, "no format `dpc` (there are canonical"),
        ((checkpoint, tmp_path / "x", "--to", "trainer"), 2, "can be read, but not written"),
        ((checkpoint, tmp_path, "--to", "dcp"), 2, "is there already"),
        ((checkpoint, tmp_path, "--to", "full"), 2, "step-00000004 is there already"),
        ((checkpoint, tmp_path / "step-00000005", "--to", "full"), 2, "the state is of step 4"),
        ((checkpoint, tmp_path / "x", "--to", "full", "--from", "dcp"), 1, ".metadata"),
        (
            (checkpoint, checkpoint / "manifest.json" / "x", "--to", "full"),
            1,
            f"error: Not a directory: {checkpoint / 'manifest.json' / 'x'}",
        ),
    ):
        result = convert(*arguments)
        assert result.exit_code == code, (arguments, result.output)
        assert message in result.output
        assert "Traceback" not in result.output
        assert "a bug in pipe" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.name]


@pytest.mark.parametrize("form", ["canonical", "full", "deepspeed", "dcp"])
def test_a_full_disk_and_a_damaged_source_leave_nothing(
    form: str, checkpoint: Path, tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        result = convert(checkpoint, tmp_path / "new", "--to", form)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.exit_code == 1
    assert re.search(r"error: File too large: .*new", result.output)
    data = checkpoint / "rank-00000.safetensors"
    with data.open("r+b") as file:
        file.seek(100_000)
        file.write(b"wrong")
    result = convert(checkpoint, tmp_path / "new", "--to", form)
    assert result.exit_code == 1
    assert "rank-00000.safetensors (exp_avg/w): damaged near byte" in result.output
    left = {path.name for path in tmp_path.rglob("*")} - {"new"}
    assert left == {checkpoint.name, *(path.name for path in checkpoint.iterdir())}


def test_deepspeed_is_read_without_it(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "ds", "--to", "deepspeed")
    program = (
        "import sys; from pathlib import Path\n"
        "from stages.formats.formats import DeepSpeed\n"
        "from pipeline.checkpoint.formats import Reading\n"
        "DeepSpeed().open(Path(sys.argv[1]), Reading())\n"
        "sys.exit('deepspeed' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "ds")], env=os.environ)
    assert done.returncode == 0
