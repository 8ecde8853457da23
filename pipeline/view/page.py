"""One HTML file with everything in it: styles, scripts, and the data of its
curves, which have no more points than a screen can show."""

from __future__ import annotations

import datetime
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pipeline.hardware.gpus import GIB
from pipeline.utils.packages import versions
from pipeline.utils.terminal import shown
from pipeline.utils.text import duration

MOST_POINTS = 500
"""Points of a curve. Longer series are cut into this many parts, and each becomes its mean, its
least and its greatest value."""
ASSETS = Path(__file__).parent / "assets"
COLOURS = ("accent", "second", "good", "third", "bad", "faint")
"""Names of colours in `page.css`, one a series; further series begin again, dashed."""
LOG_SPAN = 20
"""A logarithmic axis is worth its ticks where the greatest value is this many times the least."""
Records = Sequence[Mapping[str, Any]]
FIELDS = {
    "loss": ("Training loss", "nats per token"),
    "eval_loss": ("Held-out loss", "nats per token"),
    "grad_norm": ("Gradient norm", "before clipping"),
    "lr": ("Learning rate", ""),
    "tokens_per_second": ("Speed", "tokens per second"),
    "step_seconds": ("Time of a step", "seconds"),
    "mfu": ("Model FLOPs utilisation", "share of the peak"),
    "data_wait_share": ("Wait for data", "share of a step"),
    "peak_memory_bytes": ("Peak memory of a GPU", "GiB"),
    "peak_host_memory_bytes": ("Peak host memory of a process", "GiB"),
}
"""Field of `metrics.jsonl` -> title and unit of its plot; a plugin's number has its name."""
WIDE = ("grad_norm", "step_seconds")
"""Fields whose values may span orders of magnitude: then the axis is logarithmic."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One measurement over training steps. None stands for what was not a number."""

    steps: list[int]
    """The last step of each part."""
    mean: list[float | None]
    least: list[float | None]
    greatest: list[float | None]
    label: str = ""
    dots: bool = False
    """Whether its points are drawn too: for few, far apart."""

    @classmethod
    def of(
        cls, points: Sequence[tuple[int, Sequence[float]]], most: int = MOST_POINTS, **how: Any
    ) -> Curve:
        """The curve of steps with their values, of five significant digits."""
        count = min(most, len(points))
        edges = [part * len(points) // count for part in range(count + 1)] if count else []
        parts = [points[a:b] for a, b in itertools.pairwise(edges)]
        values = [[float(value) for _, found in part for value in found] for part in parts]

        def each(function: Callable[[list[float]], float]) -> list[float | None]:
            return [float(f"{function(found):.5g}") if found else None for found in values]

        steps, mean = [part[-1][0] for part in parts], each(statistics.fmean)
        return cls(steps=steps, mean=mean, least=each(min), greatest=each(max), **how)


def curve(
    records: Iterable[Mapping[str, Any]], name: str, most: int = MOST_POINTS, **how: Any
) -> Curve:
    """Return the curve of a field of `metrics.jsonl`, in its plot's unit, over the records that
    have it as a number or null."""
    unit = GIB if name in FIELDS and FIELDS[name][1] == "GiB" else 1
    found = [(record["step"], record[name]) for record in records if name in record]
    points = [
        (step, [] if value is None else [value / unit])
        for step, value in found
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    ]
    return Curve.of(points, most, **how)


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Curves over training steps, with one axis."""

    title: str
    unit: str = ""
    curves: Sequence[Curve]
    wide: bool = False
    """Whether its values may span orders of magnitude."""

    @property
    def log(self) -> bool:
        """Whether the axis is logarithmic: the values are above 0 and do span so much."""
        columns = [(*one.mean, *one.least, *one.greatest) for one in self.curves]
        known = [value for column in columns for value in column if value is not None]
        return self.wide and bool(known) and 0 < min(known) * LOG_SPAN <= max(known)

    @property
    def keys(self) -> Sequence[dict[str, Any]]:
        """Label, colour and number of the dash pattern of each curve."""
        return [
            {"label": one.label, "colour": COLOURS[n % len(COLOURS)], "dash": n // len(COLOURS)}
            for n, one in enumerate(self.curves)
        ]

    def record(self) -> dict[str, Any]:
        """Return what `page.js` draws: a column of steps, then the columns of the curves."""
        steps = sorted({step for one in self.curves for step in one.steps})
        columns: list[list[Any]] = [list(steps)]
        series = []
        for key, one in zip(self.keys, self.curves, strict=True):
            ranged = one.least != one.greatest and len(self.curves) <= 2
            for values in (one.mean, *((one.least, one.greatest) if ranged else ())):
                by_step = dict(zip(one.steps, values, strict=True))
                columns.append([by_step.get(step) for step in steps])
            series.append({**key, "dots": one.dots, "ranged": ranged})
        return {"log": self.log, "series": series, "data": columns}


def plots(
    runs: Sequence[tuple[str, Records]], names: Iterable[str], *, most: int = MOST_POINTS
) -> Iterator[Plot]:
    """Yield the plot of each field with a curve for each run, of those that a run has."""
    for name in names:
        title, unit = FIELDS.get(name, (shown(name), ""))
        how: dict[str, Any] = {"most": most, "dots": name == "eval_loss"}
        curves = [curve(records, name, label=label, **how) for label, records in runs]
        if any(one.steps for one in curves):
            yield Plot(title=title, unit=unit, curves=curves, wide=name in WIDE)


def clock(seconds: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return a time, in seconds since 1970, as people read it here."""
    return datetime.datetime.fromtimestamp(seconds).strftime(form)


def value_text(value: Any) -> str:
    """Return a value of a recipe or a fact as text: a string as it is, anything else as JSON."""
    return shown(value if isinstance(value, str) else json.dumps(value))


def render(template: str, plots: Sequence[Plot], **facts: Any) -> str:
    """Return a page. All facts are escaped, so that a run can say whatever it likes."""
    environment = Environment(
        loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"clock": clock, "duration": duration, "text": value_text}
    data = json.dumps([plot.record() for plot in plots], allow_nan=False, separators=(",", ":"))
    return environment.get_template(template).render(
        plots=plots, plots_json=Markup(data.replace("<", "\\u003c")),
        style=_asset("uPlot.min.css") + _asset("page.css"), library=_asset("uPlot.iife.min.js"),
        script=_asset("page.js"), version=versions().get("pipetrain", ""), **facts,
    )  # fmt: skip


def _asset(name: str) -> Markup:
    return Markup((ASSETS / name).read_text("utf-8"))
