"""The report of all runs in a folder: a table, and their curves in one plot each."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import in_words
from pipeline.execution import rundir
from pipeline.utils.files import replace_text
from pipeline.utils.packages import versions
from pipeline.utils.terminal import shown
from pipeline.utils.text import count, duration, number
from pipeline.view.ending import REPORT
from pipeline.view.report.facts import busy_seconds, where
from pipeline.view.report.page import Plot, Series, curve, render
from pipeline.view.run import History

MOST_DRAWN = 12
"""Newest runs whose curves are drawn."""
MOST_POINTS = 150
"""Points of a curve."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A run in a folder."""

    folder: Path
    started: float
    """Seconds since 1970; of a run that did not start, when its folder was changed last."""
    history: History | None
    """None where it cannot be read."""
    problem: str = ""
    """Why not."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run as a line of the table. What is not known is empty."""

    name: str
    link: str
    """Address of its report, relative to the page; empty without one."""
    state: str
    note: str
    started: str
    time: str
    where: str = ""
    steps: str = ""
    loss: str = ""
    first: str = ""
    last: str = ""
    best: str = ""
    speed: str = ""


def holds_runs(folder: Path) -> bool:
    """Return whether a folder has runs in it and is none itself."""
    return not (folder / rundir.RECIPE).exists() and any(folder.glob(f"*/{rundir.RECIPE}"))


def write_folder_report(folder: Path, to: Path | None = None) -> Path:
    """Write the report of all runs in a folder that holds runs, and return its path. Raises
    OSError."""
    path = to or folder / REPORT
    replace_text(path, folder_page(folder, runs_in(folder), path.resolve().parent))
    return path


def runs_in(folder: Path) -> list[Found]:
    """Return the runs in a folder, newest first, unreadable ones too."""
    runs = [_found(file.parent) for file in folder.glob(f"*/{rundir.RECIPE}")]
    return sorted(runs, key=lambda run: (run.started, run.folder.name), reverse=True)


def _found(folder: Path) -> Found:
    try:
        history = History(folder)
    except Exception as error:  # one broken run is no reason to show no other
        problem, changed = shown(in_words(error)), folder.stat().st_mtime
        return Found(folder=folder, started=changed, history=None, problem=problem)
    starts = (event["time"] for event in history.events if event["event"] == "run started")
    return Found(folder=folder, started=next(starts, folder.stat().st_mtime), history=history)


def folder_page(folder: Path, found: Sequence[Found], base: Path) -> str:
    """Return the page of runs; it will lie in the folder `base`."""
    rows = [_row(run, base) for run in found]
    drawn = [run.history for run in found if run.history is not None][:MOST_DRAWN]
    states = [row.state for row in rows]
    return render(
        "runs.html.j2",
        list(_plots(drawn)),
        title=f"runs in {folder.resolve().name}",
        rows=rows,
        states=[(state, states.count(state)) for state in dict.fromkeys(states)],
        drawn=len(drawn) if len(drawn) < len(found) else 0,
        version=versions().get("pipetrain", ""),
        written=datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
    )


def _row(run: Found, base: Path) -> Row:
    report = run.folder / REPORT
    started = datetime.datetime.fromtimestamp(run.started).strftime("%Y-%m-%d %H:%M")
    link = os.path.relpath(report.resolve(), base) if report.is_file() else ""
    name, link = shown(run.folder.name), Path(link).as_posix() if link else ""
    if run.history is None:
        return Row(
            name=name, link=link, state="damaged", note=run.problem, started=started, time=""
        )
    history = run.history
    steps, found, best = history.steps, history.evaluations, history.best
    rate = history.trainings[-1].speed.mean("tokens_per_second")
    ends = [event for event in history.events if event["event"] in ("run failed", "run stopped")]
    problem = ends[-1].get("problem", "") if ends and history.state != "finished" else ""
    return Row(
        name=name,
        link=link,
        state=history.state,
        note=shown(str(problem)).split("\n")[0] if history.state != "running" else "",
        started=started,
        time=duration(busy_seconds(history)),
        where=where(history),
        steps=history.trainings[-1].named(_steps(history)),
        loss=number(steps[-1]["loss"]) if steps else "",
        first=number(found[0]["eval_loss"]) if found else "",
        last=number(found[-1]["eval_loss"]) if found else "",
        best=f"{number(best['eval_loss'])} at step {best['step']}" if best else "",
        speed="" if rate is None else count(rate),
    )


def _steps(history: History) -> str:
    if not history.steps:
        return ""
    last = history.steps[-1]
    step, total = last["step"], last.get("total_steps")
    return f"{step} of {total}" if total and total != step else str(step)


def _plots(histories: Sequence[History]) -> Iterator[Plot]:
    for name, title, unit in (
        ("eval_loss", "Held-out loss", "nats per token"),
        ("loss", "Training loss", "nats per token"),
        ("tokens_per_second", "Speed", "tokens per second"),
    ):
        newest = [(one.name, one.trainings[-1]) for one in histories]
        found = [
            (f"{label} {training.label}".strip(), curve(training.records, name, most=MOST_POINTS))
            for label, training in newest
        ]
        series = [
            Series(label=shown(label), curve=points, dots=name == "eval_loss")
            for label, points in found
            if points.steps
        ]
        if series:
            yield Plot(title=title, unit=unit, series=series)
