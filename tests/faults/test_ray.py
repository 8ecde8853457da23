"""Runs under Ray Train on a real cluster of this machine: each raylet counts as a node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.pipe import Pipe
from tests.support.tiny_recipe import EXPORT, losses, outcome, training

pytest.importorskip("ray")
STEPS = 20


def write(pipe: Pipe, wrap: str, **launch: object) -> Path:
    """Write a recipe that saves every five steps."""
    stages = training(wrap=wrap, checkpoint={"every": 5, "keep": 2}, train={"steps": STEPS})
    path = pipe.folder / "recipe.yaml"
    head = {"name": "tiny", "launch": {"device": "cpu", **launch}}
    path.write_text(json.dumps(head | {"stages": stages | EXPORT}))
    return path


def test_the_numbers_are_those_of_one_machine(pipe: Pipe) -> None:
    recipe = write(pipe, "wrap.ddp", procs=2)
    calm = pipe.folder / "calm"
    assert pipe("run", str(recipe), "--run-dir", str(calm)).code == 0
    command = ("-m", "pipetrain", "run", str(recipe), "--run-dir", str(pipe.run_dir))
    found = pipe.end(pipe.start(*command, "--engine", "ray"))
    assert found.code == 0, found
    assert outcome(pipe.run_dir, STEPS) == outcome(calm, STEPS)
