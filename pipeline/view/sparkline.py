"""A curve in one line of text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

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
