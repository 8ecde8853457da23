"""The report of one run."""

from __future__ import annotations

import datetime
import json
import math
import shlex
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.contracts.metrics import training_of
from pipeline.execution import rundir
from pipeline.execution.gpu_records import hardware_records
from pipeline.execution.run_state import Training, measured
from pipeline.hardware.gpus import GIB
from pipeline.recipe.nodes import leaves
from pipeline.utils.files import replace_text
from pipeline.utils.packages import versions
from pipeline.utils.terminal import shown
from pipeline.utils.text import duration, gib, percent
from pipeline.view.ending import REPORT, prompts
from pipeline.view.report import facts
from pipeline.view.report.page import MOST_POINTS, Curve, Plot, Series, curve, render, rounded
from pipeline.view.run import PLANNED, History, json_in

MOST_MARKS = 200
MOST_ROWS = 400
"""Rows of the recipe's table."""


def write_report(folder: Path, to: Path | None = None, *, ended: bool = False) -> Path:
    """Write the report of the run in `folder`, and return its path; `ended` as for `History`.
    Raises what that raises, and OSError."""
    path = to or folder / REPORT
    replace_text(path, run_page(History(folder, ended=ended)))
    return path


def run_page(history: History) -> str:
    """Return the report as HTML."""
    plan = json_in(history.folder / rundir.PLAN, PLANNED)
    marks, gpus = facts.marks(history), list(hardware_records(history.folder))
    rows = list(_recipe_rows(history))
    starts = [event for event in history.events if event["event"] == "run started"]
    memory = facts.memory_rows(history, plan)
    parts = max(-(-len(one.steps) // MOST_POINTS) for one in history.trainings)
    # as it is typed: without the path of `pipe`
    typed = [str(word) for word in history.environment.get("command", [])]
    if typed and Path(typed[0]).name in ("pipe", "pipetrain.py"):
        typed[0] = "pipe"
    return render(
        "run.html.j2",
        [*_plots(history), *_gpu_plots(history, gpus)],
        title=history.name,
        name=history.name,
        state=history.state,
        where=facts.where(history),
        started=_clock(starts[0]["time"]) if starts else "",
        command=shown(shlex.join(typed)),
        tiles=list(facts.summary(history)),
        parts=parts if parts > 1 else 0,
        slots=list(_slots(history)),
        memory=memory,
        memory_title=facts.memory_title([label for label, _ in memory], plan),
        plan_lines=[str(line) for line in plan.get("lines", [])],
        gpus=gpu_rows(gpus),
        prompts=[prompt for one in history.trainings for prompt in prompts(one.records, one.label)],
        marks=[
            {**vars(mark), "time": "" if mark.time is None else _clock(mark.time)}
            for mark in marks[-MOST_MARKS:]
        ],
        left_out=max(0, len(marks) - MOST_MARKS),
        recipe=rows[:MOST_ROWS],
        environment=list(_environment(history)),
        version=versions().get("pipetrain", ""),
        written=_clock(datetime.datetime.now().timestamp()),
    )


def _plots(history: History) -> Iterator[Plot]:
    for training in history.trainings:
        for plot in _plots_of(training):
            yield replace(plot, title=training.named(plot.title))


def _gpu_plots(history: History, gpus: Sequence[dict[str, Any]]) -> Iterator[Plot]:
    """Yield the plots of GPUs, for each training over its own steps."""
    for training in history.trainings:
        for plot in gpu_plots([one for one in gpus if training_of(one) == training.slot]):
            yield replace(plot, title=training.named(plot.title))


def _plots_of(training: Training) -> Iterator[Plot]:
    steps = training.steps
    loss = curve(steps, "loss")
    if loss.steps:
        series = [Series(label="training", curve=loss)]
        held_out = curve(training.evaluations, "eval_loss")
        if held_out.steps:
            series.append(Series(label="held out", curve=held_out, dots=True))
        yield Plot(title="Loss", unit="nats per token", series=series)
    for name in training.measured:
        own = [one for one in training.records if name in dict(measured(one))]
        series = [Series(label=shown(name), curve=curve(own, name))]
        yield Plot(title=shown(name), series=series)
    for name, title, unit, wide in (
        ("grad_norm", "Gradient norm", "before clipping", True),
        ("lr", "Learning rate", "", False),
        ("tokens_per_second", "Speed", "tokens per second", False),
        ("step_seconds", "Time of a step", "seconds", True),
        ("mfu", "Model FLOPs utilisation", "share of the peak", False),
        ("data_wait_share", "Wait for data", "share of a step", False),
        ("peak_memory_bytes", "Peak memory of a GPU", "GiB", False),
        ("peak_host_memory_bytes", "Peak host memory of a process", "GiB", False),
    ):
        found = curve(steps, name, unit=GIB if unit == "GiB" else 1)
        if any(found.mean):
            series = [Series(label=title.lower(), curve=found)]
            yield Plot(title=title, unit=unit, series=series, wide=wide)


def _slots(history: History) -> Iterator[dict[str, Any]]:
    longest = max((slot.seconds for slot in history.slots.values()), default=0.0) or 1.0
    for name, slot in history.slots.items():
        yield {
            "slot": name,
            "use": history.uses[name],
            "state": slot.state,
            "time": duration(slot.seconds) if slot.began else "",
            "percent": round(100 * slot.seconds / longest, 1),
        }


def _recipe_rows(history: History) -> Iterator[dict[str, str]]:
    written = rundir.origins(history.folder)
    for path, value in leaves(history.recipe.public()):
        dotted = ".".join(map(str, path))
        yield {
            "path": dotted,
            "value": shown(json.dumps(value) if not isinstance(value, str) else value),
            "origin": shown(written.get(dotted, history.recipe.origin(path))),
        }


def _environment(history: History) -> Iterator[tuple[str, str]]:
    for name in ("time", "folder", "python", "platform"):
        if history.environment.get(name):
            yield name, str(history.environment[name])
    for name, version in (history.environment.get("packages") or {}).items():
        yield name, str(version)
    for slot, engine in history.engines.items():
        for name, value in engine.items():
            text = value if isinstance(value, str) else json.dumps(value)
            yield f"{slot} engine: {name}".strip(), shown(text)


def _clock(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


Records = Sequence[Mapping[str, Any]]
MEASURED = (
    ("utilisation", "GPUs busy", "share of the time"),
    ("temperature", "Temperature of GPUs", "°C"),
    ("watts", "Power of a GPU", "W"),
)
"""Fields of a reading, their titles and units."""


def gpu_plots(records: Records) -> Iterator[Plot]:
    """Yield curves over the steps: of all GPUs and readings of a step, mean, least and greatest."""
    for name, title, unit in MEASURED:
        found = _curve(records, name)
        if found.steps:
            series = [Series(label=title.lower(), curve=found)]
            yield Plot(title=title, unit=unit, series=series)


def _curve(records: Records, name: str) -> Curve:
    by_step: dict[int, list[float]] = defaultdict(list)
    for record in records:
        by_step[record["step"]] += _known(record["gpus"], name)
    steps = sorted(step for step, values in by_step.items() if values)
    size = max(1, math.ceil(len(steps) / MOST_POINTS))
    parts = [steps[at : at + size] for at in range(0, len(steps), size)]
    values = [[value for step in part for value in by_step[step]] for part in parts]
    return Curve(
        steps=[part[-1] for part in parts],
        mean=[rounded(math.fsum(found) / len(found)) for found in values],
        least=[rounded(min(found)) for found in values],
        greatest=[rounded(max(found)) for found in values],
    )


def gpu_rows(records: Records) -> list[dict[str, str]]:
    """Return a row for each GPU: what it did on the median, its greatest values, and how much of
    the time it was slowed down, and by what."""
    by_gpu: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        for gpu in record["gpus"]:
            by_gpu[gpu["index"]].append(gpu)
    return [_row(index, by_gpu[index]) for index in sorted(by_gpu)]


def _row(index: int, readings: Records) -> dict[str, str]:
    busy, degrees = _known(readings, "utilisation"), _known(readings, "temperature")
    watts, memory = _known(readings, "watts"), _known(readings, "memory_bytes")
    reasons = Counter(reason for reading in readings for reason in reading["throttled"])
    shares = (f"{name} {percent(times / len(readings))}" for name, times in reasons.most_common())
    return {
        "gpu": str(index),
        "busy": percent(statistics.median(busy)) if busy else "",
        "temperature": f"{max(degrees):.0f} °C" if degrees else "",
        "power": f"{statistics.median(watts):.0f} W, {max(watts):.0f} W" if watts else "",
        "memory": f"{gib(int(max(memory)))} GiB" if memory else "",
        "slowed": ", ".join(shares) or "never",
    }


def _known(readings: Records, name: str) -> list[float]:
    return [float(reading[name]) for reading in readings if reading.get(name) is not None]
