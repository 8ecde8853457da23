"""One HTML file with everything in it: styles, scripts, and the data of its
curves, which have no more points than a screen can show."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

MOST_POINTS = 500
"""Points of a curve. Longer series are cut into this many parts, and each becomes its mean, its
least and its greatest value."""
DIGITS = 5
"""Significant digits of a value."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One measurement over training steps. None stands for what was no number."""

    steps: list[int]
    """The last step of each part."""
    mean: list[float | None]
    least: list[float | None]
    greatest: list[float | None]

    @property
    def known(self) -> list[float]:
        """All values that are numbers, the ranges' too."""
        return [value for value in (*self.mean, *self.least, *self.greatest) if value is not None]


def curve(
    records: Iterable[Mapping[str, Any]], name: str, *, unit: float = 1, most: int = MOST_POINTS
) -> Curve:
    """Return the curve of a field of `metrics.jsonl`, in multiples of `unit`, over the records that
    have it."""
    points = [
        (record["step"], None if record[name] is None else record[name] / unit)
        for record in records
        if name in record
    ]
    count = min(most, len(points))
    edges = [part * len(points) // count for part in range(count + 1)] if count else [0]
    parts = [points[a:b] for a, b in itertools.pairwise(edges)]
    return Curve(
        steps=[part[-1][0] for part in parts],
        mean=[_of(part, lambda values: math.fsum(values) / len(values)) for part in parts],
        least=[_of(part, min) for part in parts],
        greatest=[_of(part, max) for part in parts],
    )


def _of(part: Sequence[tuple[int, Any]], function: Callable[[list[float]], float]) -> float | None:
    values = [float(value) for _, value in part if value is not None]
    return rounded(function(values)) if values else None


def rounded(value: float) -> float:
    """Return a value with the digits that a curve has."""
    return float(f"{value:.{DIGITS}g}")


ASSETS = Path(__file__).parent / "assets"
COLOURS = ("accent", "second", "good", "third", "bad", "faint")
"""Names of colours in `page.css`, one a series; further series begin again, dashed."""
LOG_SPAN = 20
"""A logarithmic axis is worth its ticks where the greatest value is this many times the least."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A curve in a plot."""

    label: str
    curve: Curve
    dots: bool = False
    """Whether its points are drawn too: for few, far apart."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Curves over training steps, with one axis."""

    title: str
    unit: str = ""
    series: Sequence[Series]
    wide: bool = False
    """Whether its values may span orders of magnitude: then the axis is logarithmic."""

    @property
    def log(self) -> bool:
        """Whether the axis is logarithmic: the values are above 0 and do span so much."""
        values = [value for one in self.series for value in one.curve.known]
        return self.wide and bool(values) and 0 < min(values) * LOG_SPAN <= max(values)

    @property
    def keys(self) -> Sequence[dict[str, Any]]:
        """Label, colour and number of the dash pattern of each series."""
        return [
            {"label": one.label, "colour": COLOURS[n % len(COLOURS)], "dash": n // len(COLOURS)}
            for n, one in enumerate(self.series)
        ]

    def record(self) -> dict[str, Any]:
        """Return what `page.js` draws: a column of steps, then the columns of the series."""
        steps = sorted({step for one in self.series for step in one.curve.steps})
        columns: list[list[Any]] = [list(steps)]
        described = []
        for key, one in zip(self.keys, self.series, strict=True):
            found = one.curve
            ranged = found.least != found.greatest and len(self.series) <= 2
            columns.append(_column(steps, found.steps, found.mean))
            if ranged:
                columns.append(_column(steps, found.steps, found.least))
                columns.append(_column(steps, found.steps, found.greatest))
            described.append({**key, "dots": one.dots, "ranged": ranged})
        return {"log": self.log, "series": described, "data": columns}


def _column(
    steps: Sequence[int], own: Sequence[int], values: Sequence[float | None]
) -> list[float | None]:
    found = dict(zip(own, values, strict=True))
    return [found.get(step) for step in steps]


def render(template: str, plots: Sequence[Plot], **facts: Any) -> str:
    """Return a page. All facts are escaped, so that a run can say whatever it likes."""
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    data = json.dumps([plot.record() for plot in plots], allow_nan=False, separators=(",", ":"))
    return environment.get_template(template).render(
        plots=plots,
        plots_json=Markup(data.replace("<", "\\u003c")),
        style=_asset("uPlot.min.css") + _asset("page.css"),
        library=_asset("uPlot.iife.min.js"),
        script=_asset("page.js"),
        **facts,
    )


def _asset(name: str) -> Markup:
    return Markup((ASSETS / name).read_text("utf-8"))
