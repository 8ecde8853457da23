"""Which checkpoints to keep."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from pipeline.checkpoint.manifest import FILE, Manifest
from pipeline.checkpoint.store import Store, step_number
from pipeline.contracts.stage import ResourceNeed
from pipeline.contracts.training import TrainingLength
from pipeline.errors import CheckpointError


class Retention(BaseModel):
    """A checkpoint is kept if any of these says so; without `last`, all are."""

    last: int | None = None
    """The newest so many."""
    every: int | None = None
    """Those whose step is a multiple."""
    best: int = 0
    """Those with the lowest held-out loss, so many."""


def forget(store: Store, retention: Retention) -> Iterator[str]:
    """Delete what need not be kept; call after a commit. Yields what could not be deleted."""
    if retention.last is None:
        return
    names = list(store.names())
    old = names[: -retention.last]
    best = best_of(store, names, retention.best) if retention.best and old else set()
    for name in old:
        step = step_number(name) or 0
        if name in best or (retention.every and step % retention.every == 0):
            continue
        try:
            store.delete(name)
        except OSError as error:
            yield f"{store.locate(name)} cannot be deleted: {error.strerror or error}"


def best_of(store: Store, names: Sequence[str], count: int) -> set[str]:
    """The `count` checkpoints with the lowest loss on held-out data; fewer, where that is not
    known."""
    losses = {name: _stored_loss(store, name) for name in names}
    ranked = sorted((loss, name) for name, loss in losses.items() if loss is not None)
    return {name for _, name in ranked[:count]}


def heldout_loss(manifest: Manifest) -> float | None:
    """The held-out loss of the checkpoint's weights; None where that is not known."""
    metrics = manifest.progress.get("metrics")
    loss = metrics.get("eval_loss") if isinstance(metrics, Mapping) else None
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None


def _stored_loss(store: Store, name: str) -> float | None:
    """None for a checkpoint that cannot be read, too."""
    try:
        return heldout_loss(Manifest.load(store.get(name, FILE), name))
    except (OSError, CheckpointError):
        return None


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


def count(retention: Retention, every: int | None, length: TrainingLength) -> Count:
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


def _saved(
    retention: Retention, every: int | None, length: TrainingLength, steps: int
) -> Sequence[int]:
    """Steps after which one may be saved, in order."""
    saved = {steps}
    if every:
        saved.update(range(every, steps, every))
    if length.saves_first or (retention.best and length.eval_first):
        saved.add(0)
    if retention.best and length.eval_every:
        saved.update(range(length.eval_every, steps, length.eval_every))
    return sorted(saved)


def _open_ended(retention: Retention, every: int | None, length: TrainingLength) -> Count:
    period = every or (length.eval_every if retention.best else None)
    if period is None:
        return Count(number=1 + length.saves_first)
    if retention.last is None:
        return Count(number=2, further=period)
    number = retention.last + retention.best + 1
    if retention.every is None:
        return Count(number=number)
    return Count(number=number, further=math.lcm(period, retention.every))


def room(number: int, there: int, size: int, folder: Path) -> ResourceNeed:
    """For checkpoints of so many bytes, of that number those that are not there; at least one."""
    missing = max(number - there, 1)
    what = f"{missing} checkpoint{'s' * (missing > 1)}"
    return ResourceNeed(what=what, disk=missing * size, folder=folder)
