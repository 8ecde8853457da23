"""How many checkpoints there will be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.length import Length
from pipeline.stage import Room
from pipeline.state.retention import Retention


@dataclass(frozen=True, kw_only=True)
class Count:
    """Of a training."""

    number: int
    """There are at most so many at once, with the one that is being written."""
    further: int | None = None
    """Where nobody knows the number of steps: so many of them bring one more than that, which is
    kept for good."""

    def __str__(self) -> str:
        said = f"{self.number} checkpoint{'s' * (self.number > 1)}"
        return said if self.further is None else f"{said}, and one more every {self.further} steps"


def count(retention: Retention, every: int | None, length: Length) -> Count:
    """Of a training that saves after every so many steps (None: at the end only)."""
    if length.steps is None:
        return _open_ended(retention, every, length)
    saved = _saved(retention, every, length, length.steps)
    if retention.last is None:
        return Count(number=len(saved))
    older = saved[:-1]
    if not retention.best:  # or those of evaluations, which may be saved or not, are the newest
        older = older[: -retention.last]
    period = retention.every
    for_good = sum(step % period == 0 for step in older) if period else 0
    most = retention.last + for_good + retention.best + 1
    return Count(number=min(most, len(saved)))


def _saved(retention: Retention, every: int | None, length: Length, steps: int) -> Sequence[int]:
    """Steps after which one may be saved, in order."""
    saved = {steps}
    if every:
        saved.update(range(every, steps, every))
    if length.saves_first or (retention.best and length.eval_first):
        saved.add(0)
    if retention.best and length.eval_every:
        saved.update(range(length.eval_every, steps, length.eval_every))
    return sorted(saved)


def _open_ended(retention: Retention, every: int | None, length: Length) -> Count:
    period = every or (length.eval_every if retention.best else None)
    if period is None:
        return Count(number=1 + length.saves_first)
    if retention.last is None:
        return Count(number=2, further=period)
    number = retention.last + retention.best + 1
    if retention.every is None:
        return Count(number=number)
    return Count(number=number, further=math.lcm(period, retention.every))


def room(number: int, there: int, size: int, folder: Path) -> Room:
    """For checkpoints of so many bytes, of that number those that are not there; at least one."""
    missing = max(number - there, 1)
    what = f"{missing} checkpoint{'s' * (missing > 1)}"
    return Room(what=what, disk=missing * size, folder=folder)
