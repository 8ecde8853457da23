"""Several runs side by side: what differs between them, what came out, and their curves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.utils.terminal import shown
from pipeline.utils.text import duration, human
from pipeline.view.history import History
from pipeline.view.report.curves import curve
from pipeline.view.report.facts import busy_seconds, median_of, where
from pipeline.view.report.page import Plot, Series, render
from pipeline.view.words import count, percent

MISSING = "-"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One property of all runs, as text; a run that lacks it has MISSING."""

    name: str
    values: tuple[str, ...]


def results(histories: Sequence[History]) -> list[Row]:
    """Return what came out of each run; without properties that no run has."""
    columns = [dict(_results(history)) for history in histories]
    names = dict.fromkeys(name for column in columns for name in column)
    return [
        Row(name=name, values=tuple(column.get(name, MISSING) for column in columns))
        for name in names
    ]


def _results(history: History) -> Iterator[tuple[str, str]]:
    steps = history.steps
    last: Mapping[str, Any] = steps[-1] if steps else {}
    yield "state", history.state
    yield "where", where(history)
    if last:
        yield "steps", str(last["step"])
    if last.get("loss") is not None:
        yield "loss", f"{last['loss']:.4f}"
    if history.best:
        yield "held-out loss", f"{history.best['eval_loss']:.4f} at {history.best['step']}"
    speed, used = median_of(steps, "tokens_per_second"), median_of(steps, "mfu")
    if speed is not None:
        yield "tokens/s", count(speed)
    if used is not None:
        yield "MFU", percent(used)
    for name, label in (("peak_memory_bytes", "GPU peak"), ("peak_host_memory_bytes", "host peak")):
        if last.get(name):
            yield label, human(last[name])
    yield "time", duration(busy_seconds(history))


def recipe_differences(histories: Sequence[History]) -> list[Row]:
    """Return the fields of the recipes that are not the same in all runs."""
    return _differences([_flat(history.recipe.public()) for history in histories])


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


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted path -> value of everything that is no mapping."""
    found: dict[str, Any] = {}
    for key, inner in value.items():
        path = f"{prefix}{key}"
        if isinstance(inner, Mapping) and inner:
            found |= _flat(inner, f"{path}.")
        else:
            found[path] = inner
    return found


def _text(value: Any) -> str:
    return shown(value if isinstance(value, str) else json.dumps(value))


def comparison_page(histories: Sequence[History]) -> str:
    """Return the comparison as one HTML page."""
    return render(
        "compare.html.j2",
        list(_plots(histories)),
        title=" and ".join(history.name for history in histories),
        names=[history.name for history in histories],
        results=results(histories),
        recipes=recipe_differences(histories),
        environments=environment_differences(histories),
    )


def _plots(histories: Sequence[History]) -> Iterator[Plot]:
    for name, title, unit in (
        ("loss", "Training loss", "nats a token"),
        ("eval_loss", "Held-out loss", "nats a token"),
        ("grad_norm", "Gradient norm", "before clipping"),
        ("tokens_per_second", "Speed", "tokens a second"),
        ("mfu", "Model FLOPs utilisation", "share of the peak"),
    ):
        found = [
            Series(label=one.name, curve=curve(one.metrics, name), dots=name == "eval_loss")
            for one in histories
        ]
        if any(one.curve.steps for one in found):
            log = name == "grad_norm" and all(one.curve.positive for one in found)
            yield Plot(title=title, unit=unit, series=found, log=log)
