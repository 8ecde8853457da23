"""What a resumed run repeats and what it does not; resumes under other recipes, accepted and
refused; and resumes that fail before they have done anything."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from pipeline.contracts.metrics import records
from pipeline.launch.job import SETTINGS, UNDONE_LINE
from pipeline.view.run import History, Run
from tests.support.pipe import Pipe
from tests.support.tiny_recipe import losses, training, write


def test_a_finished_train_is_not_repeated_to_redo_an_export(pipe: Pipe) -> None:
    recipe = pipe.recipe(export={"fault": "raise"})
    failed = pipe.run(recipe)
    assert failed.code == 1
    assert "error: rank 0 failed in slot `export`: ValueError: boom\n" in failed.stderr
    assert pipe.calls() == ["declare", "train", "export", "closed declare"]
    (pipe.run_dir / "repaired").touch()
    (pipe.run_dir / "calls.txt").unlink()
    resumed = pipe("resume", str(pipe.run_dir))
    assert resumed.code == 0, resumed.stderr
    assert resumed.stdout.startswith("continues (2 of 4 slots done)\n")
    assert pipe.calls() == ["declare", "export", "report", "closed declare"]
    assert (pipe.run_dir / "export.txt").read_text() == "trained exported"
    (pipe.run_dir / "calls.txt").unlink()
    changed = pipe("resume", str(pipe.run_dir), "export.suffix=ed")
    assert changed.code == 0, changed.stderr
    assert pipe.calls() == ["export"]  # what no one reads any more is not rebuilt
    assert (pipe.run_dir / "export.txt").read_text() == "trained exporteded"


def test_a_finished_run_has_nothing_to_do_and_needs_no_torch(pipe: Pipe) -> None:
    run = pipe.run(pipe.recipe())
    assert run.code == 0, run.stderr
    end, *results = run.stdout.splitlines()[-5:]
    assert end.startswith("finished in 0:")
    name = pipe.run_dir.name
    assert results == [
        f"  run folder  {name}",
        f"  train       {name}/train.txt",
        f"  export      {name}/export.txt",
        f"  report      {name}/report.html",
    ]
    before = pipe.calls()
    code = "import sys; sys.modules['torch'] = None; from pipeline.cli import main; main()"
    again = pipe.end(pipe.start("-c", code, "resume", str(pipe.run_dir)))
    assert again.code == 0, again.stderr
    assert again.stdout.startswith("nothing to do: every stage has finished\n")
    assert pipe.calls() == before


@pytest.fixture(scope="module")
def trained(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished training of five steps."""
    pipe = Pipe(plugin, tmp_path_factory.mktemp("trained"), starts=True)
    recipe = write(pipe.folder / "a.yaml", training(checkpoint={}, train={"steps": 5}))
    assert pipe.run(recipe).code == 0
    return pipe.run_dir


@pytest.fixture
def run(trained: Path, pipe: Pipe) -> str:
    """Return a copy of it, the run folder of `pipe`."""
    return str(shutil.copytree(trained, pipe.run_dir))


def steps_of(pipe: Pipe) -> list[int]:
    return [step for step, _ in losses(pipe.run_dir)]


def test_fewer_steps_than_are_done_are_said_and_change_no_weight(pipe: Pipe, run: str) -> None:
    for override, said in (
        ("train.steps=2", "train.steps=2 is below the 5 steps that are done: the weights are un"),
        ("train.epochs=0.5 train.steps=null", "train.epochs=0.5 is below the 1.25 epochs that "),
    ):
        fewer = pipe("resume", run, *override.split())
        assert fewer.code == 0, fewer.stderr
        assert f"\n{said}" in fewer.stdout
        assert "\n  steps       5, " in fewer.stdout
        assert History(pipe.run_dir).steps[-1]["total_steps"] == 5
    more = pipe("resume", run, "train.epochs=null", "train.steps=7")
    assert "\n  steps       7, " in more.stdout
    assert steps_of(pipe) == [1, 2, 3, 4, 5, 6, 7]
    enough = pipe("resume", run, "train.eval_last=false")
    assert "nothing left to train: step 7 of 7" in enough.stdout


AGAIN = "to train its weights again: its export as the model slot's path, without start_from"


def test_a_run_that_another_begins_must_have_a_step_to_take(pipe: Pipe, trained: Path) -> None:
    start = {"start_from": str(trained)}
    recipe = write(pipe.folder / "b.yaml", training(checkpoint=start, train={"steps": 2}))
    for overrides, said in (
        ([], "step count (5), and `train.steps` is 2: nothing would be trained (to continue: "
             "train.steps=7; "),
        (["train.steps=null", "train.epochs=1"], "position in the data (1.25 epochs), and "
         "`train.epochs` is 1: nothing would be trained (to continue: train.epochs=2.25; "),
    ):  # fmt: skip
        refused = pipe("run", str(recipe), *overrides, "--run-dir", str(pipe.run_dir))
        assert refused.code == 1
        assert f"`start_from` continues its {said}{AGAIN})" in refused.stderr
    went_on = pipe("resume", str(pipe.run_dir), "train.steps=7", "train.epochs=null")
    assert went_on.code == 0, went_on.stderr
    assert steps_of(pipe) == [6, 7]
    again = pipe("resume", str(pipe.run_dir), "train.eval_last=false")
    assert again.code == 0, again.stderr  # what it has trained itself may end
    status = json.loads(pipe("status", str(pipe.run_dir), "--json").stdout)
    assert (status["state"], status["step"]["total_steps"]) == ("finished", 7)


def settings(folder: Path) -> dict[str, bytes | None]:
    files = {name: folder / name for name in SETTINGS}
    return {name: file.read_bytes() if file.exists() else None for name, file in files.items()}


def state(folder: Path) -> tuple[str, dict[str, str]]:
    """Return the state of a run and of its slots, as `pipe status` has them."""
    history = History(folder)
    run = Run(folder, history.uses)
    run.look()
    assert run.state == history.state
    found = {slot: one.state for slot, one in run.slots.items()}
    assert found == {slot: one.state for slot, one in history.slots.items()}
    return run.state, found


WRONG = {
    "train.global_batch_size=8": "belongs to another training",
    "checkpoint.folder=elsewhere": "now there are none in",
    "data.size=-1": "failed in slot `data`",
}
"""Override of a finished run -> why it fails."""


def test_a_resume_that_fails_before_it_has_done_anything_leaves_the_run_as_it_was(
    pipe: Pipe, run: str
) -> None:
    before, finished = settings(pipe.run_dir), state(pipe.run_dir)
    assert finished[0] == "finished"
    for wrong, why in WRONG.items():
        refused = pipe("resume", run, wrong, "train.steps=6")
        assert refused.code == 1
        assert why in refused.stderr
        assert refused.stderr.splitlines()[-1] == UNDONE_LINE
        assert "pipe resume" not in refused.stderr
        assert settings(pipe.run_dir) == before
        assert state(pipe.run_dir) == finished
        assert pipe.events()[-1]["undone"]
        assert why not in (pipe.run_dir / "report.html").read_text()
    listed = json.loads(pipe("ls", str(pipe.run_dir.parent), "--json").stdout)
    assert [(one["state"], one["step"]) for one in listed] == [("finished", 5)]
    went_on = pipe("resume", run, "train.steps=6")
    assert went_on.code == 0, went_on.stderr
    assert went_on.stdout.startswith("continues at step 5 (6 of 7 slots done)\n")
    assert state(pipe.run_dir) == finished


def test_another_model_is_refused_before_anything_is_loaded(pipe: Pipe, run: str) -> None:
    longer = "model.config.num_hidden_layers=4"
    refused = pipe("resume", run, longer, "train.steps=6")
    assert refused.code == 1
    assert "model was" in refused.stderr
    again = pipe("resume", run, longer, "train.steps=6", "--accept", "model")
    assert again.code == 1
    assert "model.layers.3.self_attn.q_proj.weight is missing" in again.stderr
    kept = [path.name for path in (pipe.run_dir / "checkpoints").iterdir()]
    assert kept == ["step-00000005"]


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
    assert steps_of(pipe) == [1, 2, 3, 4, 5, 6]
    written = json.loads((pipe.run_dir / "engine.json").read_text())
    assert (written["engine"], written["world_size"]) == ("fully_shard", 1)
    accepted = pipe(
        "resume", run, "train.global_batch_size=8", "train.steps=7", "train.micro_batch_size=8",
        "--accept", "global_batch_size",
    )  # fmt: skip
    assert accepted.code == 0, accepted.stderr
    assert steps_of(pipe) == [1, 2, 3, 4, 5, 6, 7]
    last = [r for r in records(pipe.run_dir / "metrics.jsonl") if "loss" in r][-1]
    assert last["samples"] == 6 * 4 + 8


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
    assert steps_of(pipe) == [1, 2]
