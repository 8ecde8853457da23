"""How often a recipe saves and evaluates: every so many steps, or every part of an epoch."""

from __future__ import annotations

import math
from fractions import Fraction

from stages.importing.report import Draft

LONGEST = 10_000
"""Largest denominator of a part of an epoch."""


def part_of_epoch(part: Fraction) -> str:
    """Return a part of an epoch as a recipe writes it: `1 epoch`, `0.25 epochs`, `1/3 epochs`."""
    found = part.limit_denominator(LONGEST) or Fraction(1, LONGEST)
    if found == 1:
        return "1 epoch"
    exact = LONGEST % found.denominator == 0
    return f"{float(found):g} epochs" if exact else f"{found} epochs"


def put_period(draft: Draft, event: str, key: str) -> bool:
    """Set `key` to the period of an event, `save` or `eval`, if the facts say that there is one.
    Returns whether they do."""
    report = draft.report
    strategy, steps, part = (f"{event}_{name}" for name in ("strategy", "steps", "part"))
    if report.given(part):
        draft.copy(part, key)
        return True
    asked = report.value(strategy)
    if asked == "epoch":
        draft.put(key, "1 epoch", strategy)
    elif asked == "steps":
        # Evaluations come as often as records by default, and saves every 500 steps.
        default = 500 if event == "save" else report.value("train.log_every", 500)
        found = report.value(steps) or default
        draft.put(key, _period(draft, found), strategy, steps)
    return asked in ("steps", "epoch")


def _period(draft: Draft, found: int | Fraction) -> int | str:
    """Return the period of an event that comes after each so many steps, or after each share of
    the training: of its steps, rounded up, or of its epochs."""
    if isinstance(found, int):
        return found
    steps, epochs = draft.report.value("train.steps"), draft.report.value("train.epochs", 1)
    return math.ceil(found * steps) if steps else part_of_epoch(found * Fraction(str(epochs)))
