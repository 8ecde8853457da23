"""Run folders without a run."""

from __future__ import annotations

import json
import re
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


def begun(slot: str, time: float) -> dict[str, Any]:
    """Return the event of a slot that starts."""
    return {"event": "slot started", "slot": slot, "time": time}


def done(slot: str, time: float) -> dict[str, Any]:
    """Return the event of a slot that has finished."""
    return {"event": "slot finished", "slot": slot, "time": time, "digest": "", "record": None}


STARTED: list[dict[str, Any]] = [
    {"event": "run started", "time": 1000.0, "procs": 2, "device": "cpu"},
    begun("model", 1000.0), done("model", 1003.0), begun("data", 1003.0),
]  # fmt: skip
TRAINING = [
    *STARTED,
    done("data", 1004.0), begun("wrap", 1004.0), done("wrap", 1005.0), begun("train", 1005.0),
]  # fmt: skip
EVENTS = [
    *TRAINING,
    {"event": "run failed", "time": 1030.0, "problem": "rank 1 was killed"},
    {"event": "run started", "time": 1040.0, "procs": 2, "device": "cpu"},
    begun("train", 1041.0),
    {**done("train", 1061.0), "seconds": 20.0},
    {"event": "run finished", "time": 1062.0},
]


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


def evaluation(at: int, loss: float | None, best: int, lowest: float) -> dict[str, Any]:
    """Return the record of an evaluation."""
    return {"step": at, "eval_loss": loss, "best_step": best, "best_eval_loss": lowest}


def said(at: int, *texts: str) -> dict[str, Any]:
    """Return the record of texts that the prompts p0, p1, ... had at a step."""
    samples = [{"number": n, "prompt": f"p{n}", "text": one} for n, one in enumerate(texts)]
    return {"step": at, "time": 1000.0 + at, "generated": samples}


METRICS = [
    *[step(number, best_step=4, best_eval_loss=3.3) for number in range(1, 7)],
    {**evaluation(4, 3.3, 4, 3.3), "perplexity": 27.1},
    {"step": 4, "time": 1020.0, "checkpoint_stall_seconds": 0.25},
    {"step": 5, "anomaly": "the loss is a spike", "action": "skip"},
    {"step": 6, "time": 1006.0, "generated": [{"number": 0, "prompt": "Once ", "text": "upon"}]},
]


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


def drawn(page: str) -> Any:
    """Return the data of a page's curves."""
    found = re.search(r'id="plots">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])
