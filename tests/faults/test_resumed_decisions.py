"""Decisions of the loop (to skip, to roll back, to stop early) survive a kill."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tier import spread
from tests.support.tiny_recipe import EXPORT, outcome, training, write

ODD = {"size": 64, "odd": [20, 21, 22, 23]}
"""Samples of the sixth batch, which differ from the others."""
SPIKE = {"spike_window": 3, "spike_factor": 1.3}
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


def recipe(folder: Path, case: dict[str, Any]) -> Path:
    slots = training(data=case["data"], checkpoint=case["checkpoint"], train=case["train"])
    found = {}
    for slot, fields in (slots | EXPORT).items():
        if slot == "checkpoint" and "ema" in case:
            found["ema"] = case["ema"]
        found[slot] = fields
    if "ema" in case:
        found["consolidate"] = {**found["consolidate"], "weights": "ema"}
    return write(folder / "recipe.yaml", found)


def progress(run: Path) -> dict[str, Any]:
    """Return the training progress in the journal."""
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    records = [line["record"] for line in lines if line.get("slot") == "train" and "record" in line]
    found: dict[str, Any] = records[-1]["progress"]
    return found


def reached(run: Path) -> int:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return max(json.loads(line)["step"] for line in lines)


@pytest.mark.parametrize("name", spread(list(CASES), 2))
def test_a_killed_run_decides_as_one_that_was_not(
    name: str, tmp_path: Path, pipe_in_child: Callable[..., int]
) -> None:
    case = CASES[name]
    path, calm = recipe(tmp_path, case), tmp_path / "calm"
    assert pipe_in_child("run", str(path), "--run-dir", str(calm)) == 0
    last, facts = case["ends"]
    steps = last or reached(calm)
    wanted = progress(calm)
    assert {key: wanted[key] for key in facts} == facts
    if last is None:
        assert 3 < steps < case["train"]["steps"]
        assert wanted["step"] == wanted["best"]["step"] == steps - 3
    for number, kill_at in enumerate(case["kills"]):
        run = tmp_path / str(number)
        code = pipe_in_child("run", str(path), "--run-dir", str(run), kill_at=kill_at)
        assert code == -signal.SIGKILL
        assert pipe_in_child("resume", str(run)) == 0
        assert outcome(run, steps) == outcome(calm, steps)
        assert progress(run) == wanted
