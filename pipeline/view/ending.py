"""The last lines about a run that has ended: what came out, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from pipeline.execution import rundir
from pipeline.execution.metrics import records
from pipeline.execution.talk import can_talk
from pipeline.recipe import read_recipe
from pipeline.utils.terminal import shown
from pipeline.utils.text import shown_path
from pipeline.view import measurements
from pipeline.view.history import RunState
from pipeline.view.texts import before_and_after
from pipeline.view.trainings import MeanSpeed, Training, slots_that_train, trainings_in
from pipeline.view.words import count, held_out

REPORT = "report.html"
"""File of the report in a run's folder."""


def outcome(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield labels and texts of what each training of a run measured: steps and mean speed, the
    reason of an early end, the first and the last held-out loss, plugins' numbers, and answers
    before and after training. Raises OSError."""

    def slots() -> list[str]:
        recipe, _ = read_recipe(folder / rundir.RECIPE)
        return slots_that_train({s: one.use for s, one in recipe.stages.items()} if recipe else {})

    for training in trainings_in(records(folder / rundir.METRICS), slots):
        yield from ((training.named(label), text) for label, text in _measured(training))


def _measured(training: Training) -> Iterator[tuple[str, str]]:
    steps = training.steps
    speed = MeanSpeed.of(steps)
    if steps:
        rate = speed.mean("tokens_per_second")
        mean = "" if rate is None else f", {count(rate)} tokens/s (mean)"
        total = steps[-1].get("total_steps")
        whole = f" of {total}" if total and total > steps[-1]["step"] else ""
        yield "steps", f"{steps[-1]['step']}{whole}{mean}"
    reason = training.ended_early
    if reason:
        yield "ended early", shown(reason)
    text = held_out(training.evaluations, training.best)
    if text:
        yield "held-out loss", text
    for name, (step, value) in measurements.newest(training.metrics).items():
        yield name, f"{value:.4g} at step {step}"
    yield from before_and_after(training.metrics)


def next_lines(folder: Path, state: RunState) -> list[tuple[str, str]]:
    """Return labels with the files to look at and the commands to call after a run has ended; none
    while it is running."""
    run = shown_path(folder)
    if state == "running":
        return []
    lines = []
    if (folder / REPORT).is_file():
        lines.append(("report", shown_path(folder / REPORT)))
    if state != "finished":
        lines.append(("continue", f"pipe resume {shlex.quote(run)}"))
    if can_talk(folder):
        lines.append(("talk to it", f"pipe chat {shlex.quote(run)}"))
    return lines
