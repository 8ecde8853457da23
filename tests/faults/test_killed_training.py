"""A real training, killed at every stage boundary and midway, ends with the same weights."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tiny_recipe import EXPORT, outcome, training, write

POINTS = ("before_wrap", "after_wrap", "after_train", "after_consolidate", "after_export")
STEPS = 9
READ = "read 26"
"""A sample of step 7, one step after a checkpoint; each step reads four samples."""


def recipe(folder: Path) -> Path:
    """Return a recipe with `fault.point` slots at the stage boundaries."""
    slots = training(checkpoint={"every": 2, "keep": 1}, train={"steps": STEPS, "log_every": 3})
    stages = {}
    for slot, fields in (slots | EXPORT).items():
        if f"before_{slot}" in POINTS:
            stages[f"before_{slot}"] = {"use": "fault.point"}
        stages[slot] = fields
        if f"after_{slot}" in POINTS:
            stages[f"after_{slot}"] = {"use": "fault.point"}
    return write(folder / "recipe.yaml", stages)


@pytest.fixture(scope="module")
def reference(
    pipe_in_child: Callable[..., int], tmp_path_factory: pytest.TempPathFactory
) -> tuple[bytes, list[float]]:
    """Return exported weights and losses of an undisturbed run."""
    folder = tmp_path_factory.mktemp("reference")
    assert pipe_in_child("run", str(recipe(folder)), "--run-dir", str(folder / "run")) == 0
    return outcome(folder / "run", STEPS)


@pytest.mark.parametrize("kill_at", [*POINTS, READ])
def test_same_weights_and_metrics(
    tmp_path: Path,
    pipe_in_child: Callable[..., int],
    reference: tuple[bytes, list[float]],
    kill_at: str,
) -> None:
    run = tmp_path / "run"
    code = pipe_in_child("run", str(recipe(tmp_path)), "--run-dir", str(run), kill_at=kill_at)
    assert code == -signal.SIGKILL
    for file in ("journal.jsonl", "metrics.jsonl"):
        with (run / file).open("a") as opened:
            # as a kill in the middle of a write leaves it
            opened.write('{"step": 9, "loss": 1.0, "ev')
    assert pipe_in_child("resume", str(run)) == 0
    assert outcome(run, STEPS) == reference
