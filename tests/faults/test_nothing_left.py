"""Trainings that begin at their last step, or behind it."""

from __future__ import annotations

import json

from pipeline.view.run import History
from tests.support.pipe import Pipe
from tests.support.tiny_recipe import losses, training, write

AGAIN = "to train its weights again: its export as the model slot's path, without start_from"


def test_fewer_steps_than_are_done_are_said_and_change_no_weight(pipe: Pipe) -> None:
    recipe = write(pipe.folder / "a.yaml", training(checkpoint={}, train={"steps": 5}))
    assert pipe.run(recipe).code == 0
    run = str(pipe.run_dir)
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
    assert [step for step, _ in losses(pipe.run_dir)] == [1, 2, 3, 4, 5, 6, 7]
    enough = pipe("resume", run, "train.eval_last=false")
    assert "nothing left to train: step 7 of 7" in enough.stdout


def test_a_run_that_another_begins_must_have_a_step_to_take(pipe: Pipe) -> None:
    first = write(pipe.folder / "a.yaml", training(checkpoint={}, train={"steps": 5}))
    assert pipe.run(first).code == 0
    start = {"start_from": str(pipe.run_dir)}
    recipe = write(pipe.folder / "b.yaml", training(checkpoint=start, train={"steps": 2}))
    pipe.run_dir = pipe.folder / "second"
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
    assert [step for step, _ in losses(pipe.run_dir)] == [6, 7]
    again = pipe("resume", str(pipe.run_dir), "train.eval_last=false")
    assert again.code == 0, again.stderr  # what it has trained itself may end
    status = json.loads(pipe("status", str(pipe.run_dir), "--json").stdout)
    assert (status["state"], status["step"]["total_steps"]) == ("finished", 7)
