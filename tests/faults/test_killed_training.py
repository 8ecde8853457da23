"""A real training killed at every stage boundary, and in the middle, ends with the same weights."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tiny_recipe import EXPORT, outcome, training, write

POINTS = ("before_wrap", "after_wrap", "after_train", "after_consolidate", "after_export")
STEPS = 9
READ = "read 26"
"""Each step reads four samples: this one is in step 7, one step after a checkpoint."""


def recipe(folder: Path) -> Path:
    """`fault.point` slots stand at the stage boundaries."""
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
    """Exported weights and losses of the run that nothing disturbed."""
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
            opened.write('{"step": 9, "loss": 1.0, "ev')  # as a kill in the middle of a write does
    assert pipe_in_child("resume", str(run)) == 0
    assert outcome(run, STEPS) == reference
