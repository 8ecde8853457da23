"""`pipe export` and `pipe verify`, and a run with a dry run, in real processes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests.support.command import pipe
from tests.support.pipe import Outcome, Pipe
from tests.support.tiny_recipe import EXPORT, training

STEPS = 4


class Trained(NamedTuple):
    pipe: Pipe
    run: Path
    outcome: Outcome


@pytest.fixture(scope="module")
def trained(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a finished run of two processes that began with a dry run; tests do not change it."""
    folder = tmp_path_factory.mktemp("trained")
    pipe = Pipe(plugin, folder, starts=True)
    stages = training(checkpoint={"every": 2}, train={"steps": STEPS}, wrap="wrap.fsdp") | EXPORT
    recipe = folder / "recipe.yaml"
    launch = {"procs": 2, "device": "cpu"}
    content = {"name": "tiny", "dry_run": True, "launch": launch, "stages": stages}
    recipe.write_text(json.dumps(content))
    outcome = pipe.run(recipe)
    assert outcome.code == 0, outcome.stderr
    return Trained(pipe, pipe.run_dir, outcome)


def test_the_dry_run_leaves_nothing_and_changes_nothing(trained: Trained, tmp_path: Path) -> None:
    said = trained.outcome.stdout + trained.outcome.stderr
    assert "dry run: passed" in said
    assert said.index("dry run: passed") < said.index("train: train.causal_lm")
    assert not list(trained.run.rglob("*dry-run*"))
    assert sorted(path.name for path in (trained.run / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000004",
    ]
    recipe = json.loads((trained.run.parent / "recipe.yaml").read_text())
    plain = trained.run.parent / "plain.yaml"
    plain.write_text(json.dumps(recipe | {"dry_run": False}))
    other = trained.pipe("run", str(plain), "--run-dir", str(tmp_path / "plain"))
    assert other.code == 0, other.stderr
    one, two = (run / "export/model.safetensors" for run in (trained.run, tmp_path / "plain"))
    assert one.read_bytes() == two.read_bytes()


def test_a_copied_run_makes_its_own_damaged_export_again(trained: Trained, tmp_path: Path) -> None:
    """The export is made from the copy's own files, although the original run exists and has
    changed."""
    first = Path(shutil.copytree(trained.run, tmp_path / "first"))
    copy = Path(shutil.copytree(first, tmp_path / "copy"))
    shutil.rmtree(first / "checkpoints")
    weights = copy / "export" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-7] + bytes([whole[-7] ^ 4]) + whole[-6:])
    resumed = trained.pipe("resume", str(copy), "launch.procs=1")
    assert resumed.code == 0, resumed.stderr
    said = resumed.stdout + resumed.stderr
    assert (
        f"slot `export` runs again: {weights} does not hold the trained values in 1 tensor" in said
    )
    assert "train: train.causal_lm" not in said
    assert f"  export      {copy}/export\n" in said
    assert weights.read_bytes() == whole
    again = trained.pipe("resume", str(copy))
    assert again.stdout.startswith("nothing to do: every stage has finished\n")


def test_a_dry_run_that_fails_ends_the_run_on_all_ranks(plugin: Path, tmp_path: Path) -> None:
    pipe = Pipe(plugin, tmp_path, starts=True)
    stages = training(checkpoint={}, train={"steps": 1}) | EXPORT
    stages["checkpoint"] = {**stages["checkpoint"], "folder": str(tmp_path / "kept")}
    (tmp_path / "kept").mkdir()
    in_the_way = tmp_path / "kept" / f"{pipe.run_dir.name}.dry-run"
    in_the_way.write_text("in the way")
    launch = {"procs": 2, "device": "cpu"}
    recipe = tmp_path / "recipe.yaml"
    content = {"name": "tiny", "dry_run": True, "launch": launch, "stages": stages}
    recipe.write_text(json.dumps(content))
    outcome = pipe.run(recipe)
    assert outcome.code == 1
    assert re.search("rank [01] failed in slot `train`", outcome.stderr)  # it fails on both
    assert str(in_the_way) in outcome.stderr
    assert not (pipe.run_dir / "metrics.jsonl").exists()


def test_what_was_lost_is_exported_again(trained: Trained, tmp_path: Path) -> None:
    command = ("export", str(trained.run), "--out", str(tmp_path / "out"))
    assert trained.pipe(*command).code == 0
    files = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    (tmp_path / "out/model.safetensors").unlink()
    (tmp_path / "out/config.json").unlink()
    assert trained.pipe(*command).code == 0
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == files
    assert f"- run: {trained.run.name}\n" in files["README.md"].decode()


def test_an_earlier_step_in_another_dtype(trained: Trained, tmp_path: Path) -> None:
    target = tmp_path / "early"
    arguments = ("--step", "2", "--dtype", "fp32", "--max-shard-size", "20KB", "--procs", "2")
    done = trained.pipe("export", str(trained.run), *arguments, "--out", str(target))
    assert done.code == 0, done.stderr
    assert len(list(target.glob("model-*"))) > 1
    tensors = {k: v for f in target.glob("*.safetensors") for k, v in load_file(f).items()}
    last = load_file(trained.run / "export/model.safetensors")
    assert tensors.keys() == last.keys()
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert not torch.equal(tensors["model.norm.weight"].bfloat16(), last["model.norm.weight"])
    assert "- steps: 2\n" in (target / "README.md").read_text()
    verified = trained.pipe("verify", str(target))
    assert (verified.code, verified.stdout.splitlines()[-1]) == (0, "verified")


def test_a_checkpoint_that_was_moved_away(trained: Trained, tmp_path: Path) -> None:
    """Architecture and names come from an export, the weights from the checkpoint."""
    moved = tmp_path / "state"
    shutil.copytree(trained.run / "checkpoints/step-00000004", moved)
    model = str(trained.run / "export")
    done = trained.pipe("export", str(moved), "--model", model, "--out", str(tmp_path / "out"))
    assert done.code == 0, done.stderr
    one, two = (
        folder / "model.safetensors" for folder in (trained.run / "export", tmp_path / "out")
    )
    assert one.read_bytes() == two.read_bytes()


def test_a_changed_byte(trained: Trained, tmp_path: Path) -> None:
    harmed = tmp_path / "harmed"
    shutil.copytree(trained.run / "export", harmed)
    file = harmed / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    result = pipe("verify", harmed)
    assert result.exit_code == 1
    assert "does not hold the trained values in 1 tensor" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("RUN", "--step", "3"), "has no checkpoint of step 3; it has 2, 4"),
        (("RUN", "--step", "best"), "no checkpoint of .* has a loss on held-out data"),
        (("RUN/nothing", "--out", "x"), "no such folder"),
        (("RUN/export", "--out", "x"), r"does not lie in a run.*--model names"),
        (("RUN/checkpoints/step-00000004",), "--out is missing"),
        (("RUN/checkpoints/step-00000004", "--step", "4", "--out", "x"), "--step is for a run"),
        (("RUN", "--dtype", "int3", "--out", "x"), "dtype"),
        (("RUN", "--max-shard-size", "big", "--out", "x"), "is not a size"),
        (
            ("RUN/export", "--out", "x", "--model", "owner/name"),
            "has no commit of main, and HF",
        ),
        (("RUN/export", "--out", "x", "--model", "./no"), "--model: there is no ./no"),
    ],
)
def test_mistakes(
    arguments: tuple[str, ...], message: str, trained: Trained, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    result = pipe("export", *(text.replace("RUN", str(trained.run)) for text in arguments))
    assert result.exit_code == 2, result.output
    assert re.search(message, result.output), result.output


def test_no_export_at_all(trained: Trained, tmp_path: Path) -> None:
    result = pipe("verify", tmp_path)
    assert result.exit_code == 2
    assert "is not an export of ours" in result.output
