"""Several runs side by side: what differs between them, what came out, and their curves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.execution.run_state import Training, measured
from pipeline.recipe.nodes import leaves
from pipeline.utils.terminal import shown
from pipeline.utils.text import align, count, duration, human, number, percent
from pipeline.view.report.facts import busy_seconds, where
from pipeline.view.report.page import Plot, Series, curve, render
from pipeline.view.run import History, slots_that_train

MISSING = "-"
Records = Sequence[Mapping[str, Any]]


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


@dataclass(frozen=True, kw_only=True)
class Value:
    """A run's value of a property."""

    text: str
    rank: float | None = None
    """A number that is lower where the run is better; None if no value is better than another."""


def results(histories: Sequence[History]) -> list[Row]:
    """Return what came out of each run; without properties that no run has."""
    columns: list[dict[str, Value]] = []
    for history, trainings in zip(histories, _trainings(histories), strict=True):
        column = {"state": Value(text=history.state), "where": Value(text=where(history))}
        for training in trainings:
            column |= {training.named(name): value for name, value in _of_training(training)}
        columns.append({**column, "time": Value(text=duration(busy_seconds(history)))})
    names = dict.fromkeys(name for column in columns for name in column)
    missing = Value(text=MISSING)
    return [_row(name, [column.get(name, missing) for column in columns]) for name in names]


def _row(name: str, found: Sequence[Value]) -> Row:
    """Return a row; values that read the same are equally good."""
    ranks = [value.rank for value in found if value.rank is not None]
    best = {value.text for value in found if ranks and value.rank == min(ranks)}
    values = tuple(value.text for value in found)
    better = tuple(at for at, text in enumerate(values) if text in best)
    return Row(name=name, values=values, better=better if len(set(values)) > 1 else ())


def _trainings(histories: Sequence[History]) -> list[list[Training]]:
    """Return each run's trainings; if one has several, all are labelled by their slots, by which
    they are compared."""
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
    if last:
        yield "steps", Value(text=str(last["step"]))
        yield "training loss", _lower(last["loss"])
    reason = training.ended_early
    if reason:
        yield "ended early", Value(text=shown(reason))
    evaluations, best = training.evaluations, training.best
    if evaluations:
        yield "first held-out loss", Value(text=number(evaluations[0]["eval_loss"]))
        yield "last held-out loss", _lower(evaluations[-1]["eval_loss"])
    if best:
        text = f"{number(best['eval_loss'])} at step {best['step']}"
        yield "best held-out loss", Value(text=text, rank=best["eval_loss"])
    for name, values in training.measured.items():
        yield shown(name), Value(text=f"{values[-1][1]:.4g}")
    speed = training.speed
    rate, used = speed.mean("tokens_per_second"), speed.mean("mfu")
    if rate is not None:
        yield "tokens/s (mean)", Value(text=count(rate), rank=-rate)
    if used is not None:
        yield "MFU (mean)", Value(text=percent(used), rank=-used)
    for name, label in (("peak_memory_bytes", "GPU peak"), ("peak_host_memory_bytes", "host peak")):
        if last.get(name):
            yield label, Value(text=human(last[name]), rank=last[name])


def _lower(loss: float | None) -> Value:
    return Value(text=number(loss), rank=loss)


def recipe_differences(histories: Sequence[History]) -> list[Row]:
    """Return the fields of the recipes that are not the same in all runs."""
    columns = []
    for history in histories:
        fields = leaves(history.recipe.public())
        columns.append({".".join(map(str, path)): value for path, value in fields})
    return _differences(columns)


def environment_differences(histories: Sequence[History]) -> list[Row]:
    """Return the versions of packages, and the systems, that are not the same in all runs."""
    found = []
    for history in histories:
        facts = {key: history.environment.get(key) for key in ("python", "platform")}
        known = {key: value for key, value in facts.items() if value is not None}
        found.append({**known, **(history.environment.get("packages") or {})})
    return _differences(found)


def _differences(columns: Sequence[Mapping[str, Any]]) -> list[Row]:
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column):
        values = tuple(_text(column[name]) if name in column else MISSING for column in columns)
        if len(set(values)) > 1:
            rows.append(Row(name=name, values=values))
    return rows


def _text(value: Any) -> str:
    return shown(value if isinstance(value, str) else json.dumps(value))


def lines(
    names: Sequence[str],
    *,
    recipes: Sequence[Row],
    environments: Sequence[Row],
    results: Sequence[Row],
) -> Iterator[str]:
    """Yield a comparison as text: what differs, the results that differ with the best of each row
    marked, and what is equal in one line."""
    differing = [row for row in results if not row.equal]
    for title, head, rows in (
        ("recipes", "recipes differ in", recipes),
        ("environments", "environments differ in", environments),
        ("results", "results (* best)", differing),
    ):
        yield from _table(head, names, rows) if rows else [f"{title} are the same"]
        yield ""
    equal = [f"{row.name} {row.values[0]}" for row in results if row.equal]
    if equal:
        yield f"the same in all: {', '.join(equal)}"


def _table(title: str, names: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    cells = [[title, *names]]
    for row in rows:
        marked = (
            f"{value} *" if at in row.better else value for at, value in enumerate(row.values)
        )
        cells.append([row.name, *marked])
    return align(cells, left=len(names) + 1)


def comparison_page(histories: Sequence[History]) -> str:
    """Return the comparison as one HTML page: differences, results, curves, and what is equal."""
    rows = results(histories)
    return render(
        "compare.html.j2",
        list(_plots(histories)),
        title=" and ".join(history.name for history in histories),
        names=[history.name for history in histories],
        results=[row for row in rows if not row.equal],
        equal=[row for row in rows if row.equal],
        recipes=recipe_differences(histories),
        environments=environment_differences(histories),
    )


def _plots(histories: Sequence[History]) -> Iterator[Plot]:
    """Yield the curves of all runs, grouped by training."""
    found = [
        (history.name, training)
        for history, trainings in zip(histories, _trainings(histories), strict=True)
        for training in trainings
    ]
    for first in {training.label: training for _, training in found}.values():
        alike = [(name, one.records) for name, one in found if one.label == first.label]
        yield from (replace(plot, title=first.named(plot.title)) for plot in _plots_of(alike))


def _plots_of(runs: Sequence[tuple[str, Records]]) -> Iterator[Plot]:
    own = dict.fromkeys(name for _, records in runs for one in records for name, _ in measured(one))
    for name, title, unit in (
        ("loss", "Training loss", "nats per token"),
        ("eval_loss", "Held-out loss", "nats per token"),
        *((name, shown(name), "") for name in own),
        ("grad_norm", "Gradient norm", "before clipping"),
        ("tokens_per_second", "Speed", "tokens per second"),
        ("mfu", "Model FLOPs utilisation", "share of the peak"),
    ):
        found = [
            Series(label=label, curve=curve(records, name), dots=name == "eval_loss")
            for label, records in runs
        ]
        if any(one.curve.steps for one in found):
            yield Plot(title=title, unit=unit, series=found, wide=name == "grad_norm")
