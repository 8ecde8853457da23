"""Two trainings in one recipe, killed in each slot: weights, metrics and checkpoints of both end as
those of an undisturbed run."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.contracts.metrics import records
from pipeline.execution.run_state import RunState
from tests.support.tiny_recipe import EXPORT, Stages, training, write

STEPS = {"": 3, "more": 5}
"""Training -> its steps."""
POINTS = ("after_train", "after_trained", "after_wrap2", "after_more", "after_consolidate")
FIRST, SECOND = "read 10", "read 18"
"""A sample of the first training's step 3, and of the second's step 5, which the first does not
come to; each step reads four samples."""


def stages() -> Stages:
    """Return two trainings with a `fault.point` at the boundaries that are named in POINTS."""
    first = training(checkpoint={"every": 2}, train={"steps": 3})
    second = {
        "trained": {"use": "model.trained"},
        "other": {"use": "fault.data", "size": 24},
        "wrap2": {"use": "wrap.fsdp"},
        "checkpoint2": first["checkpoint"],
        "more": {**first["train"], "steps": 5},
    }
    chain: Stages = {}
    for slot, fields in (first | second | EXPORT).items():
        chain[slot] = fields
        if f"after_{slot}" in POINTS:
            chain[f"after_{slot}"] = {"use": "fault.point"}
    return chain


Outcome = tuple[bytes, dict[str, list[tuple[int, float]]], list[str]]


def outcome(run: Path) -> Outcome:
    """Return exported weights, steps and losses of each training, and the checkpoints."""
    found = RunState.of(records(run / "metrics.jsonl")).trainings
    losses = {
        slot: [(one["step"], one["loss"]) for one in own.steps] for slot, own in found.items()
    }
    for slot, steps in losses.items():
        assert [step for step, _ in steps] == list(range(1, STEPS[slot] + 1))
    saved = sorted(str(one.relative_to(run)) for one in run.glob("checkpoints*/step-*"))
    return (run / "export" / "model.safetensors").read_bytes(), losses, saved


@pytest.fixture(scope="module")
def reference(
    pipe_in_child: Callable[..., int], tmp_path_factory: pytest.TempPathFactory
) -> Outcome:
    """Return what comes of an undisturbed run."""
    folder = tmp_path_factory.mktemp("reference")
    recipe = write(folder / "recipe.yaml", stages())
    assert pipe_in_child("run", str(recipe), "--run-dir", str(folder / "run")) == 0
    found = outcome(folder / "run")
    names = ["checkpoints-more/step-00000004", "checkpoints-more/step-00000005"]
    assert found[2] == [*names, "checkpoints/step-00000002", "checkpoints/step-00000003"]
    return found


@pytest.mark.parametrize(
    "kill_at",
    [SECOND, *(pytest.param(each, marks=pytest.mark.full) for each in (*POINTS, FIRST))],
)
def test_same_weights_metrics_and_checkpoints(
    tmp_path: Path, pipe_in_child: Callable[..., int], reference: Outcome, kill_at: str
) -> None:
    run, recipe = tmp_path / "run", write(tmp_path / "recipe.yaml", stages())
    code = pipe_in_child("run", str(recipe), "--run-dir", str(run), kill_at=kill_at)
    assert code == -signal.SIGKILL
    before = started(run)
    assert pipe_in_child("resume", str(run)) == 0
    assert outcome(run) == reference
    again = set(started(run)[len(before) :])
    # a finished training is not repeated, and its engine is not built again
    first, second = {"train", "wrap"}, {"more", "wrap2"}
    assert again & first == (first if kill_at == FIRST else set())
    assert again & second == (set() if kill_at in ("after_more", "after_consolidate") else second)


def started(run: Path) -> list[str]:
    """Return the slots of the journal that have started, in order."""
    events = map(json.loads, (run / "journal.jsonl").read_text().splitlines())
    return [event["slot"] for event in events if event["event"] == "slot started"]
