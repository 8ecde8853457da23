"""Trainings killed at boundaries of slots and midway end as those that were not: the same weights,
metrics, checkpoints, and decisions of the loop (to skip, to roll back, to stop early)."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.contracts.metrics import records
from pipeline.execution.run_state import RunState
from tests.support.tier import spread
from tests.support.tiny_recipe import EXPORT, Stages, outcome, training, write

Call = Callable[..., int]
ODD = {"size": 64, "odd": [20, 21, 22, 23]}
"""Samples of the sixth batch, which differ from the others."""
SPIKE = {"spike_window": 3, "spike_factor": 1.3}


def with_points(stages: Mapping[str, dict[str, Any]], points: tuple[str, ...]) -> Stages:
    """Return the slots with a `fault.point` where the names of points say."""
    found: Stages = {}
    for slot, fields in stages.items():
        for name, own in (
            (f"before_{slot}", {"use": "fault.point"}), (slot, fields),
            (f"after_{slot}", {"use": "fault.point"}),
        ):  # fmt: skip
            if name == slot or name in points:
                found[name] = own
    return found


def killed(call: Call, folder: Path, stages: Stages, kill_at: str) -> Path:
    """Kill a run, and resume it; return its folder. Files have what a kill in the middle of a write
    leaves."""
    run = folder / "run"
    recipe = str(write(folder / "recipe.yaml", stages))
    assert call("run", recipe, "--run-dir", str(run), kill_at=kill_at) == -signal.SIGKILL
    for name in ("journal.jsonl", "metrics.jsonl"):
        if (run / name).exists():
            with (run / name).open("a") as file:
                file.write('{"step": 9, "loss": 1.0, "ev')
    assert call("resume", str(run)) == 0
    return run


def undisturbed(call: Call, folder: Path, stages: Stages) -> Path:
    recipe = str(write(folder / "recipe.yaml", stages))
    assert call("run", recipe, "--run-dir", str(folder / "run")) == 0
    return folder / "run"


STEPS, READ = 9, "read 26"
"""A sample of step 7, one step after a checkpoint; each step reads four samples."""
POINTS = ("before_wrap", "after_wrap", "after_train", "after_consolidate", "after_export")
ONE = with_points(
    training(checkpoint={"every": 2, "keep": 1}, train={"steps": STEPS, "log_every": 3}) | EXPORT,
    POINTS,
)


@pytest.fixture(scope="module")
def one(pipe_in_child: Call, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return exported weights and losses of an undisturbed training."""
    return outcome(undisturbed(pipe_in_child, tmp_path_factory.mktemp("one"), ONE), STEPS)


@pytest.mark.parametrize("kill_at", spread([*POINTS, READ], 3))
def test_one_training(tmp_path: Path, pipe_in_child: Call, one: Any, kill_at: str) -> None:
    assert outcome(killed(pipe_in_child, tmp_path, ONE, kill_at), STEPS) == one


TRAININGS = {"": 3, "more": 5}
"""Training -> its steps."""
BOUNDARIES = ("after_train", "after_trained", "after_wrap2", "after_more", "after_consolidate")
FIRST, SECOND = "read 10", "read 18"
"""A sample of the first training's step 3, and one of the second's step 5, which the first does not
come to."""
_FIRST = training(checkpoint={"every": 2}, train={"steps": 3})
TWO = with_points(
    {
        **_FIRST,
        "trained": {"use": "model.trained"},
        "other": {"use": "fault.data", "size": 24},
        "wrap2": {"use": "wrap.fsdp"},
        "checkpoint2": _FIRST["checkpoint"],
        "more": {**_FIRST["train"], "steps": 5},
        **EXPORT,
    },
    BOUNDARIES,
)


def outcomes(run: Path) -> tuple[bytes, dict[str, list[tuple[int, float]]], list[str]]:
    """Return exported weights, steps and losses of each training, and the checkpoints."""
    found = RunState.of(records(run / "metrics.jsonl")).trainings
    losses = {
        slot: [(one["step"], one["loss"]) for one in own.steps] for slot, own in found.items()
    }
    for slot, steps in losses.items():
        assert [step for step, _ in steps] == list(range(1, TRAININGS[slot] + 1))
    saved = sorted(str(one.relative_to(run)) for one in run.glob("checkpoints*/step-*"))
    return (run / "export" / "model.safetensors").read_bytes(), losses, saved


@pytest.fixture(scope="module")
def two(pipe_in_child: Call, tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = outcomes(undisturbed(pipe_in_child, tmp_path_factory.mktemp("two"), TWO))
    names = ["checkpoints-more/step-00000004", "checkpoints-more/step-00000005"]
    assert found[2] == [*names, "checkpoints/step-00000002", "checkpoints/step-00000003"]
    return found


@pytest.mark.parametrize(
    "kill_at",
    [SECOND, *(pytest.param(each, marks=pytest.mark.full) for each in (*BOUNDARIES, FIRST))],
)
def test_two_trainings(tmp_path: Path, pipe_in_child: Call, two: Any, kill_at: str) -> None:
    run = killed(pipe_in_child, tmp_path, TWO, kill_at)
    assert outcomes(run) == two
    events = [json.loads(line) for line in lines(run / "journal.jsonl")]
    resumed = [number for number, one in enumerate(events) if one["event"].startswith("run ")][1]
    again = {one["slot"] for one in events[resumed:] if one["event"] == "slot started"}
    # a finished training is not repeated, and its engine is not built again
    first, second = {"train", "wrap"}, {"more", "wrap2"}
    assert again & first == (first if kill_at == FIRST else set())
    assert again & second == (set() if kill_at in ("after_more", "after_consolidate") else second)


def lines(file: Path) -> list[str]:
    """Return the lines that are whole."""
    return [line for line in file.read_text().splitlines() if line.endswith("}")]


CASES: dict[str, dict[str, Any]] = {
    "skip": {
        "data": ODD,
        "checkpoint": {"every": 4},
        "train": {"steps": 10, "shuffle": False, "anomalies": {"spike": "skip", **SPIKE}},
        "ends": (10, {"left_out": [[20, 24]], "samples": 44}),
        # Each step reads four samples: just after the skipped batch, and after a checkpoint.
        "kills": ["read 26", "read 38"],
    },
    "rollback": {
        "data": ODD,
        "checkpoint": {"every": 2},
        "train": {"steps": 9, "shuffle": False, "anomalies": {"spike": "rollback", **SPIKE}},
        "ends": (9, {"left_out": [[16, 24]], "rollbacks": 1, "samples": 44}),
        "kills": ["read 26", "read 34"],
    },
    "average": {
        "data": {},
        "checkpoint": {"every": 4},
        "train": {"steps": 9},
        "ema": {"use": "average.ema", "decay": 0.5},
        "ends": (9, {"samples": 36}),
        "kills": ["read 26"],
    },
    "early stopping": {
        "data": {"heldout": True},
        "checkpoint": {"every": 2, "keep_best": 1},
        "train": {
            "steps": 60, "eval_every": 1, "result": "best",
            "early_stopping": {"patience": 3, "min_improvement": 0.001},
        },
        "ends": (None, {}),
        "kills": ["read 14"],
    },
}  # fmt: skip


def deciding(case: dict[str, Any]) -> Stages:
    slots = training(data=case["data"], checkpoint=case["checkpoint"], train=case["train"]) | EXPORT
    if "ema" not in case:
        return slots
    slots["consolidate"] = {**slots["consolidate"], "weights": "ema"}
    place = list(slots).index("checkpoint")
    return dict([*list(slots.items())[:place], ("ema", case["ema"]), *list(slots.items())[place:]])


def progress(run: Path) -> dict[str, Any]:
    events = map(json.loads, lines(run / "journal.jsonl"))
    found = [one["record"] for one in events if one.get("slot") == "train" and "record" in one]
    last: dict[str, Any] = found[-1]["progress"]
    return last


@pytest.mark.parametrize("name", spread(list(CASES), 2))
def test_decisions_of_the_loop(name: str, tmp_path: Path, pipe_in_child: Call) -> None:
    case = CASES[name]
    (tmp_path / "calm").mkdir()
    calm = undisturbed(pipe_in_child, tmp_path / "calm", deciding(case))
    last, facts = case["ends"]
    steps = last or max(one["step"] for one in records(calm / "metrics.jsonl"))
    wanted = progress(calm)
    assert {key: wanted[key] for key in facts} == facts
    if last is None:
        assert 3 < steps < case["train"]["steps"]
        assert wanted["step"] == wanted["best"]["step"] == steps - 3
    for number, kill_at in enumerate(case["kills"]):
        (tmp_path / str(number)).mkdir()
        run = killed(pipe_in_child, tmp_path / str(number), deciding(case), kill_at)
        assert outcome(run, steps) == outcome(calm, steps)
        assert progress(run) == wanted
