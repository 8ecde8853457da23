"""`pipe convert` from the command line."""

from __future__ import annotations

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
from tests.support.formats import digest_of

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


def test_there_and_back(checkpoint: Path, tmp_path: Path) -> None:
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


def test_mistakes(checkpoint: Path, tmp_path: Path) -> None:
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
