"""Recipes of a tiny training with data that can kill it at a sample, and their results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.contracts.metrics import records
from tests.support.runs import TINY

Stages = dict[str, dict[str, Any]]
EXPORT: Stages = {
    "consolidate": {"use": "consolidate.stream"},
    "export": {"use": "export.safetensors"},
}


def training(
    *,
    wrap: str = "wrap.ddp",
    data: Mapping[str, Any] | None = None,
    checkpoint: Mapping[str, Any],
    train: Mapping[str, Any],
) -> Stages:
    """Return the slots up to `train`, the same under every strategy. A sample is read in the step
    that it is of, so that a kill at its reading comes there."""
    loop = {"use": "train.causal_lm", "global_batch_size": 4, "log_every": 1, "workers": 0}
    return {
        "model": {"use": "model.hf", "config": TINY},
        "precision": {"use": "precision.policy", "compute": "fp32"},
        "data": {"use": "fault.data", **(data or {})},
        "optimizer": {"use": "optimizer.adamw", "lr": 0.01, "schedule": "constant"},
        "wrap": {"use": wrap},
        "checkpoint": {"use": "checkpoint.sharded", **checkpoint},
        "train": {**loop, **train},
    }


def write(path: Path, stages: Stages, *, procs: int = 1) -> Path:
    launch = {"procs": procs, "device": "cpu"}
    path.write_text(json.dumps({"name": "tiny", "launch": launch, "stages": stages}))
    return path


def losses(run: Path) -> list[tuple[int, float]]:
    """Return step and loss in the order of the file."""
    return [(r["step"], r["loss"]) for r in records(run / "metrics.jsonl") if "loss" in r]


def outcome(run: Path, steps: int) -> tuple[bytes, list[float]]:
    """Return exported weights, and the loss of every step, each of which occurs once."""
    found = losses(run)
    assert [step for step, _ in found] == list(range(1, steps + 1))
    return (run / "export" / "model.safetensors").read_bytes(), [loss for _, loss in found]
