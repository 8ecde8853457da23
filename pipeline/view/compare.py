"""Several runs: what differs between some and what came out, or a table of all in a folder, and
their curves."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.errors import in_words
from pipeline.execution import rundir
from pipeline.execution.run_state import Training, measured
from pipeline.recipe.nodes import leaves
from pipeline.utils.files import replace_text
from pipeline.utils.terminal import shown
from pipeline.utils.text import align, count, duration, human, number, percent
from pipeline.view.ending import REPORT
from pipeline.view.page import Plot, clock, plots, render, value_text
from pipeline.view.run import History, slots_that_train

MOST_DRAWN = 12
"""Newest runs whose curves are drawn."""
MOST_POINTS = 150
"""Points of a curve."""
STARTED = "%Y-%m-%d %H:%M"
COLUMNS = {
    "loss": "training loss",
    "first": "first held-out loss",
    "last": "last held-out loss",
    "best": "best held-out loss",
    "speed": "tokens/s (mean)",
}
"""Column of the table of all runs -> name of the result."""
MISSING = "-"
Value = tuple[str, float | None]
"""A run's value of a property, and a number that is lower where the run is better; None if no value
is better than another."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One property of all runs, as text; a run that lacks it has MISSING."""

    name: str
    values: tuple[str, ...]
    better: tuple[int, ...] = ()
    """Numbers of the runs with the best value; empty where none is better, or no one can say."""

    @property
    def equal(self) -> bool:
        """Whether all runs have the same value."""
        return len(set(self.values)) == 1


def results(histories: Sequence[History]) -> list[Row]:
    """Return what came out of each run; without properties that no run has."""
    columns: list[dict[str, Value]] = []
    for history, trainings in zip(histories, _trainings(histories), strict=True):
        column: dict[str, Value] = {"state": (history.state, None), "where": (history.where, None)}
        for training in trainings:
            column |= {training.named(name): value for name, value in _of_training(training)}
        columns.append({**column, "time": (duration(history.busy_seconds), None)})
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column):
        found = [column.get(name, (MISSING, None)) for column in columns]
        values, ranks = tuple(text for text, _ in found), [rank for _, rank in found]
        best = min((rank for rank in ranks if rank is not None), default=None)
        # values that read the same are equally good
        texts = {text for text, rank in found if rank is not None and rank == best}
        better = tuple(at for at, text in enumerate(values) if text in texts)
        rows.append(Row(name=name, values=values, better=better if len({*values}) > 1 else ()))
    return rows


def _trainings(histories: Sequence[History]) -> list[list[Training]]:
    """Each run's trainings, with their slots as labels if a run has several."""
    found = [history.trainings for history in histories]
    if max(map(len, found)) == 1:
        return found
    firsts = [next(iter(slots_that_train(history.uses)), "") for history in histories]
    return [
        [replace(training, label=training.label or first) for training in trainings]
        for first, trainings in zip(firsts, found, strict=True)
    ]


def _of_training(training: Training) -> Iterator[tuple[str, Value]]:
    last: Mapping[str, Any] = training.step
    evaluations, best, speed = training.evaluations, training.best, training.speed
    if last:
        yield "steps", (str(last["step"]), None)
        yield "training loss", (number(last["loss"]), last["loss"])
    if reason := training.ended_early:
        yield "ended early", (shown(reason), None)
    if evaluations:
        yield "first held-out loss", (number(evaluations[0]["eval_loss"]), None)
        loss = evaluations[-1]["eval_loss"]
        yield "last held-out loss", (number(loss), loss)
    if best:
        loss = best["eval_loss"]
        yield "best held-out loss", (f"{number(loss)} at step {best['step']}", loss)
    for name, values in training.measured.items():
        yield shown(name), (f"{values[-1][1]:.4g}", None)
    rate, used = speed.mean("tokens_per_second"), speed.mean("mfu")
    if rate is not None:
        yield "tokens/s (mean)", (count(rate), -rate)
    if used is not None:
        yield "MFU (mean)", (percent(used), -used)
    for name, label in (("peak_memory_bytes", "GPU peak"), ("peak_host_memory_bytes", "host peak")):
        if last.get(name):
            yield label, (human(last[name]), last[name])


def differences(histories: Sequence[History]) -> dict[str, list[Row]]:
    """Return what is not the same in all runs: fields of the `recipes`; of the `environments`
    versions of packages, and systems."""
    environments = [history.environment for history in histories]
    facts: dict[str, list[dict[str, Any]]] = {
        "recipes": [
            {".".join(map(str, path)): value for path, value in leaves(history.recipe.public())}
            for history in histories
        ],
        "environments": [
            {
                **{key: one[key] for key in ("python", "platform") if one.get(key) is not None},
                **(one.get("packages") or {}),
            }
            for one in environments
        ],
    }
    found = dict[str, list[Row]]()
    for title, runs in facts.items():
        columns = [{name: value_text(value) for name, value in one.items()} for one in runs]
        names = dict.fromkeys(name for column in columns for name in column)
        rows = (Row(name=n, values=tuple(one.get(n, MISSING) for one in columns)) for n in names)
        found[title] = [row for row in rows if not row.equal]
    return found


def lines(
    names: Sequence[str], *, recipes: Sequence[Row], environments: Sequence[Row],
    results: Sequence[Row],
) -> Iterator[str]:  # fmt: skip
    """Yield a comparison as text: what differs, the results that differ with the best of each row
    marked, and what is equal in one line."""
    for title, head, rows in (
        ("recipes", "recipes differ in", recipes),
        ("environments", "environments differ in", environments),
        ("results", "results (* best)", [row for row in results if not row.equal]),
    ):
        cells = [[head, *names]]
        for row in rows:
            values = enumerate(row.values)
            cells.append([row.name, *(f"{v} *" if at in row.better else v for at, v in values)])
        yield from align(cells, left=len(names) + 1) if rows else [f"{title} are the same"]
        yield ""
    equal = [f"{row.name} {row.values[0]}" for row in results if row.equal]
    if equal:
        yield f"the same in all: {', '.join(equal)}"


def comparison_page(histories: Sequence[History]) -> str:
    """Return the comparison as one HTML page: differences, results, curves, and what is equal."""
    rows, drawn = results(histories), list[Plot]()
    by_label: dict[str, list[tuple[str, Training]]] = {}
    for history, trainings in zip(histories, _trainings(histories), strict=True):
        for training in trainings:
            by_label.setdefault(training.label, []).append((history.name, training))
    for found in by_label.values():
        runs = [(name, training.records) for name, training in found]
        own = (name for _, records in runs for one in records for name, _ in measured(one))
        speeds = ("grad_norm", "tokens_per_second", "mfu")
        curves = plots(runs, ["loss", "eval_loss", *dict.fromkeys(own), *speeds])
        drawn += (replace(plot, title=found[0][1].named(plot.title)) for plot in curves)
    return render(
        "compare.html.j2", drawn, title=" and ".join(history.name for history in histories),
        names=[history.name for history in histories],
        results=[row for row in rows if not row.equal], equal=[row for row in rows if row.equal],
        **differences(histories),
    )  # fmt: skip


def holds_runs(folder: Path) -> bool:
    """Return whether a folder has runs in it and is none itself."""
    return not (folder / rundir.RECIPE).exists() and any(folder.glob(f"*/{rundir.RECIPE}"))


def write_folder_report(folder: Path, to: Path | None = None) -> Path:
    """Write the report of a folder of runs, and return its path. Raises OSError."""
    path = to or folder / REPORT
    found = runs_in(folder)
    rows = [_row(*run, path.resolve().parent) for run in found]
    histories = [history for _, _, history in found if isinstance(history, History)]
    drawn = histories[:MOST_DRAWN]
    newest = [(one.name, one.trainings[-1]) for one in drawn]
    runs = [(shown(f"{name} {one.label}".strip()), one.records) for name, one in newest]
    curves = plots(runs, ["eval_loss", "loss", "tokens_per_second"], most=MOST_POINTS)
    page = render(
        "runs.html.j2", [replace(one, curves=[c for c in one.curves if c.steps]) for one in curves],
        title=f"runs in {folder.resolve().name}", rows=rows,
        states=list(Counter(row["state"] for row in rows).items()),
        drawn=len(drawn) if len(drawn) < len(found) else 0, written=clock(time.time(), STARTED),
    )  # fmt: skip
    replace_text(path, page)
    return path


def runs_in(folder: Path) -> list[tuple[float, Path, History | str]]:
    """Return the runs in a folder, newest first: when each started (seconds since 1970; of one that
    did not, when its folder was changed last), its folder, and its history, or else why it cannot
    be read."""
    found: list[tuple[float, Path, History | str]] = []
    for run in (file.parent for file in folder.glob(f"*/{rundir.RECIPE}")):
        started = run.stat().st_mtime
        try:
            history = History(run)
        except Exception as error:  # one broken run is no reason to show no other
            found.append((started, run, shown(in_words(error))))
        else:
            started = history.starts[0]["time"] if history.starts else started
            found.append((started, run, history))
    return sorted(found, key=lambda one: (one[0], one[1].name), reverse=True)


def _row(began: float, folder: Path, history: History | str, base: Path) -> dict[str, str]:
    """Return a run as a line of the table; `link` is the address of its report relative to the
    folder `base`. What is not known is empty."""
    report = folder / REPORT
    link = Path(os.path.relpath(report.resolve(), base)).as_posix() if report.is_file() else ""
    row = {"name": shown(folder.name), "link": link, "started": clock(began, STARTED)}
    if isinstance(history, str):
        empty = dict.fromkeys(("where", "steps", "time", *COLUMNS), "")
        return {**row, **empty, "state": "damaged", "note": history}
    training = history.trainings[-1]
    step, known = training.step, dict(_of_training(training))
    total = step.get("total_steps")
    of_all = f" of {total}" if total and total != step["step"] else ""
    ends = [one for one in history.events if one["event"] in ("run failed", "run stopped")]
    failed = ends and history.state not in ("finished", "running")
    return {
        **row,
        **{key: known[name][0] if name in known else "" for key, name in COLUMNS.items()},
        "state": history.state,
        "note": shown(str(ends[-1].get("problem", ""))).split("\n")[0] if failed else "",
        "where": history.where,
        "steps": training.named(f"{step['step']}{of_all}" if step else ""),
        "time": duration(history.busy_seconds),
    }
