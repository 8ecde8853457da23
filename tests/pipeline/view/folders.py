"""Run folders without a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.execution.journal import Journal

SLOTS = {
    "model": "model.hf",
    "data": "data.text",
    "wrap": "wrap.ddp",
    "train": "train.causal_lm",
    "export": "export.safetensors",
}
RECIPE: dict[str, Any] = {
    "name": "made",
    "stages": {slot: {"use": use} for slot, use in SLOTS.items()},
}


def made(
    folder: Path,
    events: Iterable[Mapping[str, Any]] = (),
    metrics: Iterable[Mapping[str, Any]] = (),
    recipe: Mapping[str, Any] = RECIPE,
) -> Path:
    """Return a run's folder with these events and records in it; events have their own `time`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    journal = Journal(folder / "journal.jsonl")
    for event in events:
        facts = {key: value for key, value in event.items() if key != "event"}
        journal.write(event["event"], **facts)
    add(folder, metrics)
    return folder


def add(folder: Path, metrics: Iterable[Mapping[str, Any]]) -> None:
    """Append records to a run's metrics."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in metrics)


def step(number: int, **fields: Any) -> dict[str, Any]:
    """Return the record of a step, as training writes it."""
    return {
        "step": number,
        "grad_norm": 0.5,
        "lr": 1e-05,
        "tokens": 1000 * number,
        "samples": 8 * number,
        "time": 1000.0 + number,
        "step_seconds": 2.0,
        "loss": 4.0 - 0.1 * number,
        "tokens_per_second": 512.0,
        "data_wait_share": 0.01,
        "total_steps": 20,
        **fields,
    }
