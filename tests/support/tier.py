"""Two tiers of the suite: the quick one, for every change, and the full one, which `.ci/full` runs.

The quick tier takes an even part of the kill points, flipped bytes, sizes and Hypothesis examples
of the full one. Tests marked `full` run in the full tier alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

from hypothesis import settings

FULL = os.environ.get("PIPETRAIN_SUITE") == "full"

T = TypeVar("T")


def spread(values: Sequence[T], keep: int) -> Sequence[T]:
    """Return `keep` of the values at even distances, first and last among them; all in the full
    tier."""
    if FULL or len(values) <= keep:
        return values
    last = len(values) - 1
    return [values[round(number * last / max(keep - 1, 1))] for number in range(keep)]


def times(*, quick: int, full: int) -> int:
    """Return the number of repetitions in this tier."""
    return full if FULL else quick


def examples(quick: int) -> settings:
    """Return the settings of a Hypothesis test with `quick` examples, and ten times as many in the
    full tier."""
    return settings(max_examples=times(quick=quick, full=10 * quick))
