"""Numbers as people read them, and a curve in a line of text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any


def count(value: float) -> str:
    """Return `950`, `12,345`, `3.4 M` or `1.2 B`."""
    for limit, unit in ((1e9, "B"), (1e6, "M")):
        if abs(value) >= limit:
            return f"{value / limit:.1f} {unit}"
    return f"{value:,.0f}"


def gib(size: float) -> str:
    """Return a number of bytes as `61.2`, in GiB."""
    return f"{size / (1 << 30):.1f}"


def percent(share: float) -> str:
    """Return a share, 0 to 1, as `41.2 %`."""
    return f"{100 * share:.1f} %"


def number(value: float | None, form: str = ".4f") -> str:
    """Return a measurement as text; None stands for what JSON has no number for."""
    return "not a number" if value is None else f"{value:{form}}"


def held_out(evaluations: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None) -> str:
    """Return the held-out loss as `3.4000 (step 0) -> 2.9000 (step 60), best 2.8500 (step 40)`:
    the first and the last, and the best if that is another; empty without an evaluation."""
    if not evaluations:
        return ""
    first, last = evaluations[0], evaluations[-1]
    told = [first] if first["step"] == last["step"] else [first, last]
    text = " -> ".join(f"{number(one['eval_loss'])} (step {one['step']})" for one in told)
    if best is not None and best["step"] not in (one["step"] for one in told):
        text += f", best {number(best['eval_loss'])} (step {best['step']})"
    return text


BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-=+*#"


def sparkline(values: Sequence[float], width: int, bars: str = BARS) -> str:
    """Return a curve of at most `width` characters: means of as many equal parts of the values,
    from the lowest bar for the least to the highest for the greatest. Values that are not
    finite are left out."""
    finite = [value for value in values if math.isfinite(value)]
    count = min(width, len(finite))
    if count < 1:
        return ""
    edges = [part * len(finite) // count for part in range(count + 1)]
    means = [math.fsum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    least, most = min(means), max(means)
    scale = (len(bars) - 1) / (most - least) if most > least else 0.0
    return "".join(bars[round((mean - least) * scale)] for mean in means)
