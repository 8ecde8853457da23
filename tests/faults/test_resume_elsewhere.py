"""`pipe resume` under another recipe, accepted and refused."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from pipeline.contracts.metrics import records
from tests.support.pipe import Pipe
from tests.support.tiny_recipe import losses, training, write


def recipe(path: Path, *, procs: int, wrap: str, steps: int) -> Path:
    stages = training(wrap=wrap, checkpoint={"every": 2}, train={"steps": steps})
    return write(path, stages, procs=procs)


def test_another_strategy_and_world_size_go_on_and_another_training_is_refused(pipe: Pipe) -> None:
    here = recipe(pipe.folder / "ddp.yaml", procs=2, wrap="wrap.ddp", steps=3)
    there = recipe(pipe.folder / "fsdp.yaml", procs=1, wrap="wrap.fsdp", steps=6)
    assert pipe.run(here).code == 0
    run = str(pipe.run_dir)
    refused = pipe("resume", run, "--recipe", str(there), "train.global_batch_size=8")
    assert refused.code == 1
    assert "belongs to another training: global_batch_size was 4, is 8" in refused.stderr
    assert "--accept global_batch_size" in refused.stderr
    own = yaml.safe_load((pipe.run_dir / "recipe.yaml").read_text())
    assert own["stages"]["wrap"]["use"] == "wrap.ddp"  # the refused recipe did not replace it
    lost = pipe("resume", run, "train.steps=4", f"checkpoint.folder={pipe.folder / 'new'}")
    assert lost.code == 1
    assert f"this run saved checkpoints in {pipe.run_dir / 'checkpoints'}" in lost.stderr
    went_on = pipe("resume", run, "--recipe", str(there), "train.micro_batch_size=1")
    assert went_on.code == 0, went_on.stderr
    assert [step for step, _ in losses(pipe.run_dir)] == [1, 2, 3, 4, 5, 6]
    written = json.loads((pipe.run_dir / "engine.json").read_text())
    assert (written["engine"], written["world_size"]) == ("fully_shard", 1)
    accepted = pipe(
        "resume", run, "train.global_batch_size=8", "train.steps=7", "train.micro_batch_size=8",
        "--accept", "global_batch_size",
    )  # fmt: skip
    assert accepted.code == 0, accepted.stderr
    assert [step for step, _ in losses(pipe.run_dir)] == [1, 2, 3, 4, 5, 6, 7]
    steps = [r for r in records(pipe.run_dir / "metrics.jsonl") if "loss" in r]
    last = steps[-1]
    assert last["samples"] == 6 * 4 + 8


def test_another_model_is_refused_before_anything_is_loaded(pipe: Pipe) -> None:
    assert pipe.run(recipe(pipe.folder / "a.yaml", procs=1, wrap="wrap.ddp", steps=1)).code == 0
    longer = "model.config.num_hidden_layers=4"
    refused = pipe("resume", str(pipe.run_dir), longer, "train.steps=2")
    assert refused.code == 1
    assert "model was" in refused.stderr
    again = pipe("resume", str(pipe.run_dir), longer, "train.steps=2", "--accept", "model")
    assert again.code == 1
    assert "model.layers.3.self_attn.q_proj.weight is missing" in again.stderr
    kept = sorted(path.name for path in (pipe.run_dir / "checkpoints").iterdir())
    assert kept == ["step-00000001"]


def test_other_frozen_weights_are_refused_by_their_names(pipe: Pipe) -> None:
    here = recipe(pipe.folder / "a.yaml", procs=1, wrap="wrap.ddp", steps=1)
    frozen = "model.frozen=['model.layers.0.*']"
    assert pipe("run", str(here), frozen, "--run-dir", str(pipe.run_dir)).code == 0
    run, hint = str(pipe.run_dir), "frozen weights are not in checkpoints: to freeze others, start"
    thawed = pipe("resume", run, "train.steps=2", "model.frozen=[]")
    assert thawed.code == 1
    assert "model.layers.0.self_attn.q_proj.weight is missing" in thawed.stderr
    assert hint in thawed.stderr
    more = pipe("resume", run, "train.steps=2", "model.frozen=['model.layers.*']")
    assert more.code == 1
    assert "model.layers.1.self_attn.q_proj.weight was trained, here it is frozen" in more.stderr
    assert hint in more.stderr
    assert pipe("resume", run, "train.steps=2").code == 0
    assert [step for step, _ in losses(pipe.run_dir)] == [1, 2]
