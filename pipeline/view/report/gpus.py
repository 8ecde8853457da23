"""A report's table and curves of the GPUs of the launching machine."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.view.report.curves import MOST_POINTS, Curve, rounded
from pipeline.view.report.page import Plot, Series
from pipeline.view.words import gib, percent

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
